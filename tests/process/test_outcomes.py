"""What a function has returned is not lost or misjudged while others hold the writer."""

from __future__ import annotations

import time

from django.contrib.auth.models import Group
from django.db import transaction

from relay_queue.models import Job
from relay_queue.query import looks
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, on_each_engine, writer_taken

LIMIT_SECONDS = 4.0
"""Of leases and attempts: long for a function that waits for a file, whatever the load."""

HELD_SECONDS = LIMIT_SECONDS + 5.0 + 1.0
"""Beyond the limit, and beyond the grace of a process whose slots are all stuck."""

UNTRUE = "Every slot is held"


def over(farm: Farm, job_id: int) -> bool:
    """Whether the last lease of a job has passed."""
    return farm.leases(job_id)[-1].expires_at <= looks.now()


@on_each_engine
def test_an_outcome_that_waits_for_the_writer_is_judged_by_when_its_function_returned(
    farm: Farm,
) -> None:
    workers = farm.work(lease=LIMIT_SECONDS, concurrency=1)
    job = farm.enqueue(chores.wait, farm.file("go"), timeout_seconds=LIMIT_SECONDS)
    farm.wait_runs(job, word="began")
    with writer_taken(farm):
        farm.make("go")
        farm.wait_runs(job, word="ended")
        time.sleep(HELD_SECONDS)
        assert over(farm, job)
    farm.wait_state(job, "succeeded", "dead", "ready", "retrying")
    assert farm.outcomes(job) == ["acked"], farm.story(job)
    assert len(farm.runs(job, "ended")) == 1
    assert UNTRUE not in farm.log(workers)
    (lease,) = farm.leases(job)
    assert lease.renewed_at == lease.ended_at, "the renewal that was owed is in the ledger"


@on_each_engine
def test_a_function_that_goes_on_beyond_its_lease_behind_a_held_writer_keeps_its_job(
    farm: Farm,
) -> None:
    workers = farm.work(lease=LIMIT_SECONDS, concurrency=1)
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    with writer_taken(farm):
        time.sleep(HELD_SECONDS)
        assert over(farm, job)
    wait_until(lambda: not over(farm, job), message=lambda: farm.story(job))
    farm.make("go")
    farm.wait_state(job, "succeeded")
    assert farm.outcomes(job) == ["acked"]
    assert len(farm.runs(job, "ended")) == 1
    assert UNTRUE not in farm.log(workers)


def test_a_function_that_returns_after_its_time_limit_is_timed_out_though_the_writer_was_held(
    farm: Farm,
) -> None:
    farm.work(concurrency=2)
    job = farm.enqueue(chores.wait_first_time, farm.file("go"), timeout_seconds=1.0)
    farm.wait_runs(job, word="began")
    with writer_taken(farm):
        time.sleep(2)
        farm.make("go")
        farm.wait_runs(job, word="ended")
    farm.wait_state(job, "succeeded")
    assert farm.outcomes(job) == ["timed_out", "acked"]
    assert farm.wait_refused(farm.leases(job)[0].id).refused_verb == "ack"


def test_a_worker_that_must_leave_with_outcomes_says_which_jobs_run_again(farm: Farm) -> None:
    workers = farm.work()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    with writer_taken(farm):
        farm.make("go")
        farm.wait_runs(job, word="ended")
        workers.terminate()
        workers.wait()
    farm.wait_logged(workers, f"The outcomes of 1 jobs could not be written: {job}.")
    farm.work()
    farm.wait_state(job, "succeeded")
    assert farm.outcomes(job) == ["lost", "acked"]


@on_each_engine
def test_atomic_jobs_do_not_use_up_the_time_of_those_behind_them(farm: Farm) -> None:
    """All wait for one writer, for much longer than any of them may run."""
    farm.work(concurrency=16, processes=2)
    jobs = [farm.enqueue(chores.write_slowly, 0.2) for _ in range(32)]
    farm.wait_finished()
    assert {outcome for job in jobs for outcome in farm.outcomes(job)} == {"acked"}
    assert {farm.job(job).attempt for job in jobs} == {1}
    assert len(farm.runs(word="began")) == len(jobs) == Group.objects.count()


def test_atomic_jobs_wait_for_a_program_that_writes_again_and_again(farm: Farm) -> None:
    workers = farm.work(concurrency=5)
    jobs = [farm.enqueue(chores.write_slowly, 0.0, timeout_seconds=0.5) for _ in range(5)]
    others = 0
    while others < 3 or Job.objects.filter(finished_at=None).exists():
        with transaction.atomic():
            Group.objects.create(name=f"other {others}")
            time.sleep(1.0)
        others += 1
        assert others < 60, farm.everything()
    assert [farm.outcomes(job) for job in jobs] == [["acked"]] * 5, farm.log(workers)


@on_each_engine
def test_jobs_for_which_the_system_gives_no_thread_go_back_and_none_hangs(farm: Farm) -> None:
    workers = farm.drive("deny_threads", farm.file("deny"), "--lease-seconds=2")
    first = farm.enqueue(chores.note)
    farm.wait_state(first, "succeeded")  # in the one thread that there will be
    farm.make("deny")
    jobs = [farm.enqueue(chores.wait, farm.file("go"))]
    farm.wait_runs(jobs[0], word="began")
    jobs.append(farm.enqueue(chores.note))
    wait_until(lambda: "unrun" in farm.outcomes(jobs[1]), message=lambda: farm.log(workers))
    farm.make("go")
    coroutines = [farm.enqueue(chores.wait_asynchronously, farm.file("go")) for _ in range(3)]
    for job in [*jobs, *coroutines]:
        assert farm.wait_state(job, "succeeded").attempt == 1
        assert set(farm.outcomes(job)) <= {"unrun", "acked"}
    farm.wait_logged(workers, "No thread for another slot")
    farm.wait_logged(workers, "No thread for coroutines")
