"""How workers hear of work: by the bell and by timers. Looking now and then is 300 s away here.

Every deadline is far below that, so what is noticed was not noticed by looking now and then.
"""

from __future__ import annotations

import os
import shutil
import signal
from datetime import timedelta
from itertools import pairwise

from relay_queue import clock, store
from relay_queue.models import Lease
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, on_each_engine, stopped

ENQUEUE = "import sys; from tests.process import chores; chores.note.enqueue(sys.argv[1])"


@on_each_engine
def test_idle_workers_hear_of_a_job_of_another_process(farm: Farm) -> None:
    farm.work(processes=2)
    farm.python(ENQUEUE, farm.effects)
    wait_until(lambda: len(farm.runs()) == 1)


def test_every_job_of_a_burst_is_noticed(farm: Farm) -> None:
    farm.work(processes=2, concurrency=2)
    for _ in range(3):
        for _ in range(25):
            farm.enqueue(chores.note)
        farm.wait_finished()


def test_without_bells_a_job_is_found_by_looking_now_and_then(farm: Farm) -> None:
    farm.relay["POLL_SECONDS"] = 1
    farm.work()
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    shutil.rmtree(f"{farm.database}-bells")
    farm.wait_state(farm.enqueue(chores.note), "succeeded")


@on_each_engine
def test_a_job_that_is_due_in_a_second_starts_by_a_timer(farm: Farm) -> None:
    farm.work()
    due = clock.now() + timedelta(seconds=1)
    job = farm.enqueue(chores.note, run_after=due)
    farm.wait_state(job, "succeeded")
    assert farm.leases(job)[0].acquired_at >= due


def test_a_worker_that_starts_between_enqueue_and_due_time_has_the_timer_too(farm: Farm) -> None:
    job = farm.enqueue(chores.note, run_after=clock.now() + timedelta(seconds=3))
    farm.work()
    farm.wait_state(job, "succeeded")


def test_a_back_off_ends_without_other_traffic(farm: Farm) -> None:
    farm.work()
    job = farm.enqueue(chores.fail_for_a_second)
    assert farm.wait_state(job, "succeeded").attempt == 2
    first, second = farm.leases(job)
    assert first.ended_at is not None
    assert second.acquired_at - first.ended_at >= timedelta(seconds=1)


@on_each_engine
def test_a_snooze_or_a_release_rings_for_whoever_is_idle(farm: Farm) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 0
    first = farm.work(concurrency=1)
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    farm.work(concurrency=1)
    first.terminate()
    farm.wait_runs(job, 2, word="began")
    farm.make("go")
    farm.wait_state(job, "succeeded")
    assert farm.outcomes(job) == ["released", "acked"]


def test_leases_of_a_killed_worker_are_ended_by_an_idle_one(farm: Farm) -> None:
    """The supervisor dies too, so nobody tells the other worker: it finds out by itself."""
    first = farm.work()
    job = farm.enqueue(chores.wait_first_time, farm.file("never"))
    farm.wait_runs(job)
    farm.work()
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    farm.wait_state(job, "succeeded")
    lost, acked = farm.leases(job)
    assert (lost.outcome, acked.outcome) == ("lost", "acked")


@on_each_engine
def test_a_lease_that_runs_out_is_noticed_without_any_ring(farm: Farm) -> None:
    farm.work()
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    job = claimed_by_nobody(farm, lease_seconds=3)
    farm.wait_state(job, "succeeded")
    assert farm.outcomes(job) == ["expired", "acked"]


def test_a_lease_that_was_seen_is_ended_when_it_runs_out(farm: Farm) -> None:
    job = claimed_by_nobody(farm, lease_seconds=3)
    farm.work()
    farm.wait_state(job, "succeeded")
    assert farm.outcomes(job) == ["expired", "acked"]


@on_each_engine
def test_a_paused_queue_rests_and_goes_on_when_it_is_resumed(farm: Farm) -> None:
    farm.work()
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    farm.do(store.pause, "default")
    paused = farm.enqueue(chores.note)
    other = farm.enqueue(chores.note, queue_name="other")
    farm.wait_state(other, "succeeded")
    assert (farm.job(paused).state, farm.leases(paused)) == ("ready", [])
    farm.do(store.resume, "default")
    farm.wait_state(paused, "succeeded")


def test_a_job_that_runs_when_its_queue_is_paused_is_finished(farm: Farm) -> None:
    farm.work()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job)
    farm.do(store.pause, "default")
    farm.make("go")
    assert farm.wait_state(job, "succeeded").attempt == 1


@on_each_engine
def test_a_place_in_a_limited_queue_is_given_on_at_once(farm: Farm) -> None:
    with store.transaction() as tx:
        store.ensure_queue(tx, "narrow")
        store.set_limits(tx, "narrow", capacity=None, max_running=1)
    farm.work(processes=2)
    for _ in range(10):
        farm.enqueue(chores.note_slowly, 0.02, queue_name="narrow")
    farm.wait_finished()
    spans = sorted(Lease.objects.values_list("acquired_at", "ended_at"))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_stopped_worker_does_not_keep_a_job_from_the_others(farm: Farm) -> None:
    farm.work(concurrency=1)
    first = farm.worker()
    farm.work(concurrency=1)
    with stopped(first):
        for _ in range(5):
            farm.wait_state(farm.enqueue(chores.note), "succeeded")
    assert first not in {run.pid for run in farm.runs()}


def claimed_by_nobody(farm: Farm, lease_seconds: float) -> int:
    """Make a job that is leased to an owner who is not there, without a ring."""
    job = store.new_job(
        task=chores.note.module_path, args=[farm.effects], lease_seconds=lease_seconds
    )
    with store.transaction() as tx:
        job_id = store.enqueue(tx, job).job_id
        store.claim(tx, worker_id=None, queues=["default"], limit=1)
    return job_id
