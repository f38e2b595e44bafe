"""Functions that harm their process: they are charged, end as dead letters, and hurt no neighbour."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from django.contrib.auth.models import Group

import relay_queue
from relay_queue import store
from relay_queue.models import Job, Lease, Worker
from tests.conftest import wait_until
from tests.process import chores, poisons
from tests.process.farm import SHORT_SECONDS, Farm, is_alive, on_each_engine


@pytest.mark.parametrize(("kind", "attempts"), [("exit", 3), ("abort", 2), ("kill", 2)])
def test_a_function_that_kills_its_process_goes_dead_after_its_attempts(
    farm: Farm, kind: str, attempts: int
) -> None:
    farm.work()
    job = farm.enqueue(chores.poison, kind, max_attempts=attempts)
    dead = farm.wait_state(job, "dead")
    assert (dead.attempt, farm.outcomes(job)) == (attempts, ["lost"] * attempts)
    assert len(farm.runs(job)) == attempts
    farm.wait_state(farm.enqueue(chores.note), "succeeded")


def test_a_function_that_closes_every_file_of_its_process_ends_it_and_nothing_untrue_is_stored(
    farm: Farm,
) -> None:
    """SQLite tries for ten seconds to make sense of files that were closed under it.

    The process may die of that with the outcome in hand, or store it over a new connection. The
    outcome is true, so both are right. Another process does the next job in either case.
    """
    farm.work()
    pid = farm.worker()
    job = farm.enqueue(chores.poison, "close", max_attempts=1)
    done = farm.wait_state(job, "dead", "succeeded")
    stored = (done.state, done.attempt, farm.outcomes(job))
    assert stored in [("dead", 1, ["lost"]), ("succeeded", 1, ["acked"])]
    assert len(farm.runs(job)) == 1
    wait_until(lambda: not is_alive(pid))
    after = farm.enqueue(chores.note)
    farm.wait_state(after, "succeeded")
    assert farm.runs(after)[0].pid != pid


# What is stored of each: the state of the job, how its only attempt ended, and words of the reason.
FAILED, FATAL, FINE = ("dead", ["failed"]), ("dead", ["fatal"]), ("succeeded", ["acked"])
STORED: dict[str, tuple[tuple[str, list[str]], str]] = {
    "odd": (FAILED, "Odd: odd"),
    "mute": (FAILED, "Mute"),
    "liar": (FAILED, "Liar: liar"),
    "anonymous": (FAILED, "who"),
    "notes": (FAILED, "HugeNotes: notes"),
    "exit": (FAILED, "SystemExit: 3"),
    "interrupt": (FAILED, "KeyboardInterrupt"),
    "generator": (FAILED, "GeneratorExit"),
    "stop": (FAILED, "StopIteration"),
    "memory": (FAILED, "MemoryError"),
    "cancelled": (FAILED, "CancelledError"),
    "surrogate": (FAILED, "and more"),
    "long": (FAILED, "ValueError: xxx"),
    "lines": (FAILED, "ValueError: one two three"),
    "group": (FAILED, "ExceptionGroup: many"),
    "empty": (FAILED, "ValueError"),
    "recursion": (FAILED, "RecursionError"),
    "50 MB": (FAILED, "ValueError: xxx"),
    "open atomic": (FAILED, "left a transaction open on 'default'"),
    "open savepoint": (FAILED, "ValueError: two blocks deep"),
    "closed connection": (FINE, ""),
    "closed in atomic": (FINE, ""),  # Django's own block says nothing either
    "threads": (FINE, ""),
    "handlers": (FAILED, "signal only works in main thread"),
    "warnings": (FINE, ""),
    "no JSON": (FATAL, "set"),
    "odd object": (FATAL, "Unequal"),
    "no number": (FATAL, "nan"),
    "too large": (FATAL, "2,000,002 bytes"),
    "surrogate result": (FATAL, "surrogate"),
}
ASYNCHRONOUS = ("odd", "mute", "exit", "interrupt", "memory", "surrogate", "no JSON", "too large")
"""What coroutines do as well, in the one event loop of their process."""

DELETED = "tests.process.poisons.deleted"


@pytest.mark.parametrize(
    ("engine", "concurrency"), [("sqlite", 1), ("sqlite", 4), ("postgresql", 4)]
)
def test_whatever_a_function_does_its_reason_is_stored_and_no_other_job_is_disturbed(
    farm: Farm, concurrency: int
) -> None:
    assert set(STORED) == set(poisons.KINDS)
    workers = farm.work(concurrency=concurrency)
    pid = farm.worker()
    jobs, neighbours = {}, []
    if concurrency > 1:
        neighbours = [farm.enqueue(chores.wait, farm.file("go"), max_attempts=1)]
    for kind in STORED:
        jobs[kind] = farm.enqueue(poisons.poison, kind, max_attempts=1)
        neighbours.append(farm.enqueue(chores.note, max_attempts=1))
    for kind in ASYNCHRONOUS:
        poison = poisons.poison_asynchronously
        jobs[f"{kind} in a coroutine"] = farm.enqueue(poison, kind, max_attempts=1)
    neighbours.append(farm.enqueue(chores.wait_asynchronously, "/", max_attempts=1))
    with store.transaction() as tx:
        jobs["deleted"] = store.enqueue(tx, store.new_job(task=DELETED)).job_id
    neighbours.append(farm.enqueue(chores.write_together, "after all", "/", max_attempts=1))
    for job in jobs.values():
        farm.wait_state(job, "dead", "succeeded")
    farm.make("go")
    for job in neighbours:
        assert farm.wait_state(job, "succeeded").attempt == 1, farm.story(job)
    expected = {f"{kind} in a coroutine": STORED[kind] for kind in ASYNCHRONOUS}
    expected |= {**STORED, "deleted": (FATAL, DELETED)}
    found = {}
    for kind, (_, words) in expected.items():
        job = farm.job(jobs[kind])
        reason = words if words in job.last_error else job.last_error[:300]
        found[kind] = ((job.state, farm.outcomes(job.pk)), reason)
    assert found == expected
    assert {farm.job(job).attempt for job in jobs.values()} == {1}
    reasons = Lease.objects.filter(outcome__in=["failed", "fatal"]).values_list("error", flat=True)
    assert all(reasons), "the class of each exception is in the ledger"
    assert [group.name for group in Group.objects.all()] == ["after all"]
    assert farm.workers() == [pid], farm.log(workers)


def test_a_crasher_does_not_condemn_its_neighbours(farm: Farm) -> None:
    """Each death charges all that the process held, so a crasher must not meet them each time."""
    farm.work(concurrency=8)
    neighbours = [farm.enqueue(chores.note_slowly, 0.2, max_attempts=3) for _ in range(12)]
    crasher = farm.enqueue(chores.poison, "kill", max_attempts=3)
    neighbours += [farm.enqueue(chores.note_slowly, 0.2, max_attempts=3) for _ in range(12)]
    assert farm.wait_state(crasher, "dead").attempt == 3
    for job in neighbours:
        done = farm.wait_state(job, "succeeded")
        assert "lost" not in farm.outcomes(job)[2:], "a suspect runs beside no other suspect"
        assert done.attempt <= 3


@on_each_engine
def test_each_death_is_told_once_by_the_log_with_its_reason(farm: Farm) -> None:
    """Beside the framework's line, which is written or not as the project's logging says."""
    until, once = farm.file("until"), {"max_attempts": 1}
    killer = farm.enqueue(chores.poison, "kill", max_attempts=2)
    supervisor = farm.work()
    # It would take the others along, and lines of the loop that wait to be written.
    farm.wait_state(killer, "dead")
    relay_queue.pause("default")
    altered = farm.enqueue(chores.note)
    row = Job.objects.filter(pk=altered)
    sound = row.get().payload
    row.update(payload="{}")
    relay_queue.resume("default")
    failed = farm.enqueue(chores.fail_times, 9, **once)
    overdue = farm.enqueue(chores.wait, until, timeout_seconds=SHORT_SECONDS, **once)
    reasons = {
        killer: "attempt 2 was its last: the worker died",
        altered: "its row was altered: ChecksumMismatch",
        failed: "attempt 1 was its last: ValueError: attempt 1",
        overdue: "attempt 1 was its last: TimedOut",
    }
    for job in reasons:
        farm.wait_state(job, "dead")
    farm.make("until")
    names = {failed: " (tests.process.chores.fail_times)"}  # of a function's own failure
    for job, why in reasons.items():
        said = f"job {job}{names.get(job, '')} will not be tried again"
        line = f"{said}, since {why}"
        wait_until(lambda line=line: line in farm.log(supervisor), message=farm.everything)
        assert farm.log(supervisor).count(said) == 1
    row.update(payload=sound)  # for the look at the ledger at the end


def test_many_crashers_go_dead_one_by_one_and_the_others_succeed(farm: Farm) -> None:
    farm.work(concurrency=4, processes=2)
    crashers = [farm.enqueue(chores.poison, "exit", max_attempts=2) for _ in range(3)]
    neighbours = [farm.enqueue(chores.note, max_attempts=10) for _ in range(10)]
    farm.wait_finished()
    assert {farm.job(job).state for job in crashers} == {"dead"}
    assert {farm.job(job).state for job in neighbours} == {"succeeded"}


@pytest.mark.parametrize("kind", ["deafen", "chdir", "program"])
def test_what_a_function_does_to_its_process_hurts_no_other_job(farm: Farm, kind: str) -> None:
    farm.work(concurrency=1)
    pid = farm.worker()
    assert farm.wait_state(farm.enqueue(chores.poison, kind), "succeeded").attempt == 1
    after = [farm.enqueue(chores.note), farm.enqueue(chores.write_together, kind, "/")]
    for job in after:
        assert farm.wait_state(job, "succeeded").attempt == 1
    assert farm.workers() == [pid]


def test_a_worker_whose_handlers_were_replaced_loses_its_job_and_not_its_ledger(farm: Farm) -> None:
    workers = farm.work(concurrency=2)
    farm.wait_state(farm.enqueue(chores.poison, "deafen"), "succeeded")
    job = farm.enqueue(chores.wait_first_time, farm.file("never"))
    farm.wait_runs(job)
    os.kill(farm.worker(), signal.SIGTERM)  # it has lost the handler that would ignore this
    assert farm.wait_state(job, "succeeded").attempt == 2
    assert farm.outcomes(job) == ["lost", "acked"]
    assert workers.poll() is None


@on_each_engine
def test_a_child_that_a_function_leaves_behind_does_not_keep_a_dead_worker_alive(
    farm: Farm,
) -> None:
    farm.work(processes=2)
    job = farm.enqueue(chores.leave_child_and_die, farm.file("go"))
    (first,) = farm.wait_runs(job)
    assert farm.wait_state(job, "succeeded").attempt == 2
    assert farm.outcomes(job) == ["lost", "acked"]
    assert not is_alive(first.pid)
    assert farm.runs(job)[1].pid != first.pid
    farm.make("go")


def test_a_forked_child_that_lives_on_changes_nothing(farm: Farm) -> None:
    farm.work(concurrency=2)
    pid = farm.worker()
    assert farm.wait_state(farm.enqueue(chores.poison, "fork"), "succeeded").attempt == 1
    for _ in range(5):
        farm.wait_state(farm.enqueue(chores.note), "succeeded")
    assert farm.workers() == [pid]


@pytest.mark.parametrize("kind", ["return in child", "raise in child"])
def test_a_forked_child_that_comes_back_from_its_function_is_no_second_worker(
    farm: Farm, kind: str
) -> None:
    workers = farm.work(concurrency=2)
    pid = farm.worker()
    job = farm.enqueue(chores.poison, kind)
    assert farm.wait_state(job, "succeeded").attempt == 1
    for _ in range(5):
        done = farm.enqueue(chores.note)
        farm.wait_state(done, "succeeded")
        assert farm.runs(done)[0].pid == pid
    # It has nothing to do here: it must be gone without being told.
    wait_until(lambda: set(farm.pids()) == {workers.pid, pid}, message=lambda: str(farm.pids()))


@pytest.mark.parametrize(
    ("chore", "how"),
    [(chores.hog, 1.5), (poisons.compute, "regex"), (poisons.compute, "power")],
    ids=["C call", "regex", "power"],
)
def test_a_function_that_keeps_the_interpreter_past_its_lease_is_overtaken(
    farm: Farm, chore: Any, how: float | str
) -> None:
    farm.work(concurrency=2)
    # With its other place taken the first worker cannot take the job over from itself.
    farm.wait_runs(farm.enqueue(chores.wait, farm.file("go")))
    job = farm.enqueue(chore, how, farm.file("go"), lease_seconds=1)
    (first,) = farm.wait_runs(job, word="began")
    farm.work(lease=60)
    farm.wait_state(job, "succeeded")
    second = farm.runs(job, "began")[1]
    assert second.pid != first.pid
    farm.make("go")
    late = farm.wait_refused(farm.leases(job)[0].id)
    assert (late.outcome, late.refused_verb) == ("expired", "ack")
    assert farm.outcomes(job) == ["expired", "acked"]


def test_a_function_that_keeps_the_interpreter_hurts_only_its_own_process(farm: Farm) -> None:
    farm.work(processes=2, concurrency=1)
    os.mkfifo(farm.file("pipe"))
    hog = farm.enqueue(chores.hog_until_opened, farm.file("start"), farm.file("pipe"))
    farm.wait_runs(hog, word="began")
    # Not while its loop writes: it would keep the writer as well, and be killed for that.
    wait_until(lambda: Worker.objects.filter(claimed=1).exists())
    farm.make("start")
    farm.wait_runs(hog, word="hogs")
    try:
        for _ in range(10):
            farm.wait_state(farm.enqueue(chores.note), "succeeded")
    finally:
        os.close(os.open(farm.file("pipe"), os.O_RDWR))
    assert farm.wait_state(hog, "succeeded").attempt == 1


def test_two_jobs_of_a_module_that_is_being_imported_both_run(farm: Farm) -> None:
    with store.transaction() as tx:
        job = store.new_job(task="tests.process.slow_import.nothing")
        store.enqueue_many(tx, [job] * 8)
    farm.work(concurrency=8)
    farm.wait_finished()
    errors = set(Job.objects.values_list("state", "attempt", "last_error"))
    assert errors == {("succeeded", 1, "")}
