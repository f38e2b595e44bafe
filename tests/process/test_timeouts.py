"""Time limits and cancellation with real functions that do not want to end."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group

from relay_queue import clock, store
from relay_queue.models import Lease
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import SHORT_SECONDS, Farm, on_each_engine


def test_a_function_past_its_timeout_runs_again_in_another_slot(farm: Farm) -> None:
    farm.work(concurrency=2)
    job = farm.enqueue(chores.wait_first_time, farm.file("go"), timeout_seconds=SHORT_SECONDS)
    assert farm.wait_state(job, "succeeded").attempt == 2
    first, second = farm.leases(job)
    assert (first.outcome, second.outcome) == ("timed_out", "acked")
    assert first.error == "relay_queue.exceptions.TimedOut"
    assert first.ended_at is not None
    assert first.ended_at >= first.acquired_at
    farm.make("go")
    assert farm.wait_refused(first.id).refused_verb == "ack"


def test_a_function_that_heeds_its_deadline_is_timed_out_and_not_refused(farm: Farm) -> None:
    farm.work(concurrency=1)
    job = farm.enqueue(chores.heed, timeout_seconds=0.3, max_attempts=2)
    dead = farm.wait_state(job, "dead")
    assert farm.outcomes(job) == ["timed_out", "timed_out"]
    assert "TimedOut" in dead.last_error
    assert len(farm.workers()) == 1


@on_each_engine
def test_a_coroutine_past_its_timeout_is_cancelled(farm: Farm) -> None:
    farm.work(concurrency=1)
    job = farm.enqueue(
        chores.wait_asynchronously, farm.file("never"), timeout_seconds=SHORT_SECONDS
    )
    assert farm.wait_state(job, "succeeded").result == '"attempt 2"'
    assert [run.word for run in farm.runs(job)] == ["began", "cancelled", "began", "ended"]
    assert farm.outcomes(job) == ["timed_out", "acked"]


@on_each_engine
def test_a_process_with_no_usable_slot_is_replaced(farm: Farm) -> None:
    workers = farm.work(concurrency=2)
    first = farm.worker()
    jobs = [
        farm.enqueue(chores.wait_first_time, farm.file("never"), timeout_seconds=SHORT_SECONDS)
        for _ in range(2)
    ]
    for job in jobs:
        farm.wait_state(job, "succeeded")
        assert farm.outcomes(job) == ["timed_out", "acked"]
    assert all(run.pid != first for run in farm.runs(word="ended"))
    farm.wait_logged(workers, "Every slot is held by a function that does not end")


def test_a_replaced_process_is_known_to_have_ended(farm: Farm) -> None:
    farm.work(concurrency=1)
    first = farm.worker()
    job = farm.enqueue(chores.wait_first_time, farm.file("never"), timeout_seconds=SHORT_SECONDS)
    farm.wait_state(job, "succeeded")
    wait_until(lambda: first not in farm.workers())


def test_one_stuck_slot_keeps_nobody_from_working(farm: Farm) -> None:
    farm.work(concurrency=2)
    pid = farm.worker()
    stuck = farm.enqueue(chores.wait, farm.file("go"), timeout_seconds=0.2, max_attempts=1)
    farm.wait_state(stuck, "dead")
    others = [farm.enqueue(chores.note) for _ in range(20)]
    for job in others:
        farm.wait_state(job, "succeeded")
    assert farm.workers() == [pid]
    farm.make("go")
    assert farm.wait_refused(farm.leases(stuck)[0].id).outcome == "timed_out"


@on_each_engine
def test_an_atomic_function_past_its_timeout_loses_its_writes(farm: Farm) -> None:
    farm.work(concurrency=1)
    job = farm.enqueue(chores.write_together, "late", farm.file("go"), timeout_seconds=1.5)
    farm.wait_runs(job, word="wrote")
    time.sleep(1.5)
    farm.make("go")
    farm.wait_state(job, "succeeded")
    assert farm.outcomes(job) == ["timed_out", "acked"]
    assert Group.objects.filter(name="late").count() == 1


def test_a_function_that_keeps_the_writer_ends_its_process_and_not_the_project(farm: Farm) -> None:
    farm.relay["GATE_HOLD_SECONDS"] = 2
    workers = farm.work()
    first = farm.worker()
    job = farm.enqueue(chores.begin_by_hand_and_wait, farm.file("never"))
    farm.wait_runs(job, word="holds")
    assert farm.wait_state(job, "succeeded").attempt == 2
    assert farm.outcomes(job) == ["lost", "acked"]
    farm.wait_logged(workers, "has held the writer for")
    assert first not in farm.workers()


def test_the_flag_of_a_cancelled_job_is_seen_by_a_polite_function(farm: Farm) -> None:
    farm.work(concurrency=1)
    job = farm.enqueue(chores.heed)
    farm.wait_runs(job)
    farm.do(store.cancel, [job])
    (lease,) = farm.leases(job)
    late = farm.wait_refused(lease.id)
    assert (late.outcome, late.refused_verb) == ("cancelled", "nack")
    assert farm.job(job).state == "cancelled"
    # Its slot is free again.
    farm.wait_state(farm.enqueue(chores.note), "succeeded")


def test_a_cancelled_coroutine_keeps_nothing(farm: Farm) -> None:
    farm.work(concurrency=1)
    job = farm.enqueue(chores.wait_asynchronously, farm.file("go"))
    farm.wait_runs(job)
    farm.do(store.cancel, [job])
    farm.make("go")
    (lease,) = farm.leases(job)
    assert farm.wait_refused(lease.id).outcome == "cancelled"
    assert farm.job(job).result is None


@pytest.mark.parametrize("state", ["ready", "scheduled", "retrying"])
def test_a_job_cancelled_before_it_runs_never_runs(farm: Farm, state: str) -> None:
    if state == "retrying":
        farm.work()
        job = farm.enqueue(chores.fail_for_seconds)
        farm.wait_state(job, "retrying")
    else:
        when = {"run_after": clock.now() + timedelta(seconds=1)} if state == "scheduled" else {}
        job = farm.enqueue(chores.note, **when)
    runs = len(farm.runs(job))
    farm.do(store.cancel, [job])
    if state != "retrying":
        farm.work()
    due = farm.job(job).available_at
    wait_until(lambda: clock.now() > due)
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    assert farm.job(job).state == "cancelled"
    assert len(farm.runs(job)) == runs
    assert not Lease.objects.filter(job=job, ended_at=None).exists()


@on_each_engine
def test_a_cancelled_job_can_be_requeued_while_its_old_function_still_runs(farm: Farm) -> None:
    farm.work(concurrency=2)
    job = farm.enqueue(chores.wait_first_time, farm.file("go"))
    farm.wait_runs(job, word="began")
    farm.do(store.cancel, [job])
    farm.do(store.requeue, [job])
    assert farm.wait_state(job, "succeeded").result == '"attempt 2"'
    farm.make("go")
    late = farm.wait_refused(farm.leases(job)[0].id)
    assert late.outcome == "cancelled"
    assert farm.job(job).result == '"attempt 2"'
