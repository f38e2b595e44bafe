"""Prune: old finished jobs go with their leases, a bounded bite at a time, and nothing else goes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from relay_queue import store
from relay_queue.exceptions import InvalidJob
from relay_queue.models import Job, Lease, QueueMinute, Worker
from relay_queue.states import State
from tests.store.actions import (
    START,
    Wall,
    ack,
    after,
    assert_counters_exact,
    cancel,
    claim,
    claim_one,
    counted,
    do,
    enqueue,
    enqueue_each,
    nack,
    nothing_written,
    register,
    rolled_back,
    rows,
)

pytestmark = pytest.mark.usefixtures("wall")


def finish(count: int) -> list[int]:
    ids = enqueue_each(count)
    for held in claim(count):
        ack(held)
    return ids


def test_only_jobs_that_finished_before_the_time_are_pruned(wall: Wall) -> None:
    old = finish(1)
    wall.advance(10)
    new = finish(1)
    assert do(store.prune, State.SUCCEEDED, after(10)).jobs == 1
    assert list(rows(Job).values_list("id", flat=True)) == new
    assert not rows(Lease).filter(job_id__in=old).exists()
    assert rows(Lease).filter(job_id__in=new).count() == 1
    assert_counters_exact()


@pytest.mark.parametrize("state", ["succeeded", "dead", "cancelled"])
def test_only_the_state_that_was_named_is_pruned(state: str, wall: Wall) -> None:
    finish(1)
    enqueue()
    nack(claim_one(), fatal=True)
    cancel(enqueue())
    enqueue()
    wall.advance(1)
    assert do(store.prune, state, wall.now).jobs == 1
    assert sum(counted().values()) == 3
    assert (("default", state) in counted()) is False
    assert_counters_exact()


@pytest.mark.parametrize("state", ["scheduled", "ready", "running", "retrying", "nonsense", ""])
def test_a_state_that_is_not_finished_cannot_be_pruned(state: Any, wall: Wall) -> None:
    enqueue()
    with nothing_written(), pytest.raises(ValueError, match="not finished"):
        do(store.prune, state, after(999))


def test_the_oldest_go_first_and_the_limit_is_kept(wall: Wall) -> None:
    ids = []
    for _ in range(5):
        ids += finish(1)
        wall.advance(1)
    assert do(store.prune, "succeeded", wall.now, limit=2).jobs == 2
    assert list(rows(Job).order_by("id").values_list("id", flat=True)) == ids[2:]
    assert do(store.prune, "succeeded", wall.now, limit=2).jobs == 2
    assert do(store.prune, "succeeded", wall.now, limit=2).jobs == 1
    assert do(store.prune, "succeeded", wall.now, limit=2).jobs == 0
    assert_counters_exact()


def test_a_prune_that_is_rolled_back_deletes_nothing(wall: Wall) -> None:
    finish(3)
    wall.advance(1)
    with nothing_written(), rolled_back() as tx:
        assert store.prune(tx, State.SUCCEEDED, wall.now).jobs == 3


@pytest.mark.parametrize("hours", [-12, 0, 14])
def test_the_time_means_the_same_in_every_zone(hours: int, wall: Wall) -> None:
    finish(1)
    zone = timezone(timedelta(hours=hours))
    assert do(store.prune, "succeeded", START.astimezone(zone)) == (0, False)
    moment = START + timedelta(microseconds=1)
    assert do(store.prune, "succeeded", moment.astimezone(zone)) == (1, False)


def test_the_time_means_the_same_in_every_zone_for_workers_and_minutes(wall: Wall) -> None:
    zone = timezone(timedelta(hours=14))
    worker_id = register()
    do(store.stop_workers, [worker_id], "done")
    do(store.roll_up, worker_id, {("default", START): store.Totals()})
    assert do(store.prune_workers, START.astimezone(zone)) == 0
    assert do(store.prune_minutes, START.astimezone(zone)) == 0
    moment = START + timedelta(microseconds=1)
    assert do(store.prune_workers, moment.astimezone(zone)) == 1
    assert do(store.prune_minutes, moment.astimezone(zone)) == 1


NAIVE = datetime(2030, 1, 1)


def test_a_time_without_a_zone_is_refused(wall: Wall) -> None:
    finish(1)
    do(store.stop_workers, [register()], "done")
    for verb in (store.prune_workers, store.prune_minutes):
        with nothing_written(), pytest.raises((InvalidJob, ValueError)):
            do(verb, NAIVE)
    with nothing_written(), pytest.raises((InvalidJob, ValueError)):
        do(store.prune, State.SUCCEEDED, NAIVE)


def test_a_worker_is_pruned_only_when_it_stopped_long_ago_and_holds_nothing(wall: Wall) -> None:
    alive, recent, holding, gone = (register() for _ in range(4))
    enqueue_each(2)
    claim_one(worker_id=holding)
    done = claim_one(worker_id=gone)
    ack(done)
    do(store.stop_workers, [holding, gone], "drained")
    wall.advance(10)
    do(store.stop_workers, [recent], "drained")
    assert do(store.prune_workers, after(10)) == 1
    assert set(rows(Worker).values_list("id", flat=True)) == {alive, recent, holding}
    assert rows(Lease).get(pk=done.lease_id).worker_id == gone, "the ledger outlives the worker"
    assert do(store.prune_workers, wall.now + timedelta(days=1), limit=1) == 1


def test_minutes_are_pruned_by_age_the_oldest_first() -> None:
    minutes = {("default", START + timedelta(minutes=n)): store.Totals() for n in range(5)}
    do(store.roll_up, 1, minutes)
    assert do(store.prune_minutes, after(120), limit=1) == 1
    assert do(store.prune_minutes, after(120)) == 1
    left = rows(QueueMinute).order_by("minute").values_list("minute", flat=True)
    assert list(left) == [after(120), after(180), after(240)]


def test_nothing_old_prunes_nothing() -> None:
    finish(1)
    with nothing_written():
        assert do(store.prune, State.SUCCEEDED, datetime(2000, 1, 1, tzinfo=UTC)) == (0, False)
        assert do(store.prune_workers, datetime(2000, 1, 1, tzinfo=UTC)) == 0
        assert do(store.prune_minutes, datetime(2000, 1, 1, tzinfo=UTC)) == 0
