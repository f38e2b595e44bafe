"""Leases live as long as their owner works, and no longer."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

from django.db.models import F

from relay_queue import store
from relay_queue.models import Job, Lease
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, on_each_engine, stopped, writer_taken

LEASE_SECONDS = 5.0
"""Renewed when half of it is over, so that a machine may pause for two seconds at any moment."""


def wait_until_outlived(count: int) -> None:
    """Wait until so many leases have been renewed for longer than they last."""
    lasted = timedelta(seconds=LEASE_SECONDS)

    def outlived() -> bool:
        leases = Lease.objects.filter(renewed_at__gt=F("acquired_at") + lasted)
        return leases.count() == count

    wait_until(outlived, message="the leases are renewed again and again")


def test_a_job_longer_than_many_leases_runs_once(farm: Farm) -> None:
    """Functions and coroutines alike."""
    farm.work(lease=LEASE_SECONDS, processes=2)
    jobs = [
        farm.enqueue(chore, farm.file("go")) for chore in (chores.wait, chores.wait_asynchronously)
    ]
    wait_until_outlived(len(jobs))
    farm.make("go")
    for job in jobs:
        assert farm.wait_state(job, "succeeded").attempt == 1
        assert farm.outcomes(job) == ["acked"]
        assert len(farm.runs(job, "began")) == 1


@on_each_engine
def test_many_leases_are_renewed_together(farm: Farm) -> None:
    farm.work(lease=LEASE_SECONDS, concurrency=16)
    jobs = [farm.enqueue(chores.wait, farm.file("go")) for _ in range(16)]
    wait_until(lambda: len(farm.runs(word="began")) == 16)
    wait_until_outlived(16)
    farm.make("go")
    farm.wait_finished()
    assert {outcome for job in jobs for outcome in farm.outcomes(job)} == {"acked"}
    assert len(farm.runs(word="began")) == 16


def test_a_writer_held_for_half_a_lease_causes_no_duplicate(farm: Farm) -> None:
    """Nobody can renew or settle meanwhile. The one who comes through first must not expire all."""
    farm.work(lease=8, processes=3)
    jobs = [farm.enqueue(chores.wait, farm.file("go")) for _ in range(12)]
    wait_until(lambda: len(farm.runs(word="began")) == 12)
    # Held across the time of renewal, which is after four seconds.
    time.sleep(2)
    with writer_taken(farm):
        time.sleep(3)
    wait_until(lambda: not Lease.objects.filter(renewed_at=None).exists())
    farm.make("go")
    farm.wait_finished()
    assert {outcome for job in jobs for outcome in farm.outcomes(job)} == {"acked"}
    assert set(Job.objects.values_list("attempt", flat=True)) == {1}


def test_a_writer_held_beyond_the_leases_loses_no_job(farm: Farm) -> None:
    farm.work(lease=1, processes=2)
    # On a busy machine a lease of a second may run out again and again.
    jobs = [farm.enqueue(chores.note_slowly, 1.0, max_attempts=50) for _ in range(8)]
    wait_until(lambda: len(farm.runs()) == 8)
    with writer_taken(farm):
        time.sleep(2.5)
    farm.wait_finished()
    assert {farm.job(job).state for job in jobs} == {"succeeded"}
    for job in jobs:
        *before, last = farm.outcomes(job)
        assert (set(before) <= {"expired"}, last) == (True, "acked")
        assert len(farm.runs(job)) == len(before) + 1


@on_each_engine
def test_the_job_of_a_stopped_worker_goes_to_another_and_its_late_word_is_refused(
    farm: Farm,
) -> None:
    farm.work(lease=1)
    old = farm.worker()
    job = farm.enqueue(chores.wait_first_time, farm.file("go"))
    farm.wait_runs(job, word="began")
    farm.work()
    with stopped(old):
        farm.wait_state(job, "succeeded")
    farm.make("go")
    late = farm.wait_refused(farm.leases(job)[0].id)
    assert (late.outcome, late.refused_verb) == ("expired", "ack")
    assert farm.job(job).attempt == 2
    # The worker that was away works on as if nothing had been.
    os.kill(next(pid for pid in farm.workers() if pid != old), signal.SIGKILL)
    farm.wait_state(farm.enqueue(chores.note), "succeeded")


def test_a_worker_stopped_for_less_than_its_lease_keeps_its_jobs(farm: Farm) -> None:
    farm.work(lease=20)
    old = farm.worker()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job)
    farm.work()
    with stopped(old):
        time.sleep(2)
    farm.make("go")
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert farm.outcomes(job) == ["acked"]


def test_a_token_is_no_use_to_anyone_after_the_ack(farm: Farm) -> None:
    farm.work()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.make("go")
    farm.wait_state(job, "succeeded")
    (lease,) = farm.leases(job)
    result = farm.job(job).result
    assert farm.do(store.ack, lease.id, lease.token, '"again"').accepted
    assert not farm.do(store.nack, lease.id, lease.token).accepted
    assert not farm.do(store.ack, lease.id, "0" * 32, '"forged"').accepted
    done = farm.job(job)
    assert (done.state, done.result) == ("succeeded", result)
