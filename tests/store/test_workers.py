"""The registry of workers and what they write about themselves."""

from __future__ import annotations

import json

import pytest
from django.db import IntegrityError

from relay_queue import store
from relay_queue.models import QueueMinute, Worker
from relay_queue.query import looks
from relay_queue.states import WorkerOrder
from tests.store.actions import (
    START,
    Wall,
    after,
    claim_one,
    do,
    enqueue,
    nothing_written,
    register,
    release,
    rolled_back,
    rows,
)

pytestmark = pytest.mark.usefixtures("wall")


def test_a_worker_is_registered_with_all_it_says_of_itself() -> None:
    worker_id = register(
        incarnation="f" * 32,
        name="w1",
        host="h",
        boot_id="b",
        pid=42,
        lock_device=2**40,
        lock_inode=2**62,
        queues=["a", "b"],
        concurrency=16,
    )
    stored = rows(Worker).get(pk=worker_id)
    assert (stored.incarnation, stored.name, stored.host) == ("f" * 32, "w1", "h")
    assert (stored.boot_id, stored.pid, stored.queues) == ("b", 42, "a,b")
    assert (stored.lock_device, stored.lock_inode, stored.concurrency) == (2**40, 2**62, 16)
    assert (stored.started_at, stored.heartbeat_at) == (START, START)
    assert (stored.stopped_at, stored.stop_reason) == (None, "")


def test_a_worker_without_a_lock_file_is_registered() -> None:
    stored = rows(Worker).get(pk=register(lock_device=None, lock_inode=None))
    assert (stored.lock_device, stored.lock_inode) == (None, None)


def test_an_incarnation_is_registered_once() -> None:
    register(incarnation="a" * 32)
    with nothing_written(), pytest.raises(IntegrityError):
        register(incarnation="a" * 32)


def test_ids_of_workers_are_never_used_again(wall: Wall) -> None:
    """Else the leases of a pruned worker would belong to a newcomer."""
    first = register()
    do(store.stop_workers, [first], "done")
    wall.advance(1)
    do(store.prune_workers, wall.now)
    assert register(incarnation="b" * 32) > first


def test_a_heartbeat_tells_the_time_and_the_totals(wall: Wall) -> None:
    worker_id, other = register(), register()
    wall.advance(5)
    do(store.heartbeat, worker_id, store.Totals(claimed=4, succeeded=3, failed=2, refused=1))
    stored = rows(Worker).get(pk=worker_id)
    assert stored.heartbeat_at == after(5)
    assert (stored.claimed, stored.succeeded, stored.failed, stored.refused) == (4, 3, 2, 1)
    assert rows(Worker).get(pk=other).heartbeat_at == START


def test_a_worker_that_was_written_off_by_mistake_is_alive_again_with_its_next_beat(
    wall: Wall,
) -> None:
    worker_id = register()
    do(store.stop_workers, [worker_id], "vanished")
    wall.advance(5)
    do(store.heartbeat, worker_id, store.Totals(claimed=9))
    stored = rows(Worker).get(pk=worker_id)
    assert (stored.stopped_at, stored.stop_reason) == (None, "")
    assert (stored.heartbeat_at, stored.claimed) == (after(5), 9)


def test_only_silent_workers_that_hold_nothing_are_written_off(wall: Wall) -> None:
    silent, holding, stopped = (register() for _ in range(3))
    enqueue(lease_seconds=1000)
    held = claim_one(worker_id=holding)
    do(store.stop_workers, [stopped], "drained")
    wall.advance(100)
    beating = register()
    assert do(store.write_off_workers, after(0)) == 0
    assert do(store.write_off_workers, after(100)) == 1
    stored = {w.id: w.stop_reason for w in rows(Worker)}
    assert stored == {
        silent: "vanished: no heartbeat",
        holding: "",
        stopped: "drained",
        beating: "",
    }
    release(held)
    assert do(store.write_off_workers, after(100), limit=1) == 1
    assert rows(Worker).get(pk=holding).stopped_at == after(100)


def test_stopping_tells_how_many_were_not_yet_and_keeps_the_first_reason(wall: Wall) -> None:
    one, two, three = (register() for _ in range(3))
    assert do(store.stop_workers, [one], "drained") == 1
    wall.advance(5)
    assert do(store.stop_workers, [one, two, 10**6], "killed") == 1
    assert do(store.stop_workers, [], "nobody") == 0
    stored = {w.id: (w.stopped_at, w.stop_reason) for w in rows(Worker)}
    assert stored[one] == (START, "drained")
    assert stored[two] == (after(5), "killed")
    assert stored[three] == (None, "")


def test_a_long_reason_is_cut_to_its_column() -> None:
    worker_id = register()
    do(store.stop_workers, [worker_id], "x" * 999)
    assert rows(Worker).get(pk=worker_id).stop_reason == "x" * 200


def test_a_registration_that_is_rolled_back_never_was() -> None:
    with nothing_written(), rolled_back():
        register()


def test_totals_of_a_minute_replace_what_the_worker_wrote_before() -> None:
    first = store.Totals(1, 2, 3, 4, 5, 6, 7, wait={3: 1}, run={10: 2})
    do(store.roll_up, 7, {("a", START): store.Totals(claimed=9), ("b", START): first})
    do(store.roll_up, 7, {("a", START): first, ("a", after(60)): first})
    do(store.roll_up, 8, {("a", START): store.Totals(claimed=1)})
    do(store.roll_up, 8, {})
    assert rows(QueueMinute).count() == 4
    stored = rows(QueueMinute).get(queue="a", worker_id=7, minute=START)
    assert (stored.claimed, stored.succeeded, stored.failed, stored.retried) == (1, 2, 3, 4)
    assert (stored.died, stored.expired, stored.refused) == (5, 6, 7)
    assert json.loads(stored.wait_histogram) == {"3": 1}
    assert json.loads(stored.run_histogram) == {"10": 2}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, 0), (-5, 0), (0.000001, 1), (0.000002, 2), (0.000003, 2), (0.000004, 3), (1, 20)],
)
def test_a_bucket_doubles_the_one_before(seconds: float, expected: int) -> None:
    assert store.bucket(seconds) == expected


def test_buckets_never_go_down_as_durations_grow() -> None:
    buckets = [store.bucket(2**n / 1_000_000) for n in range(40)]
    assert buckets == sorted(set(buckets))


def test_an_order_stands_on_the_row_until_it_is_taken_back(wall: Wall) -> None:
    one, other = register(), register()
    assert looks.order_of(one) == ""
    wall.advance(5)
    assert do(store.order_workers, [one], WorkerOrder.QUIET) == [one]
    assert (looks.order_of(one), looks.order_of(other)) == ("quiet", "")
    assert rows(Worker).get(pk=one).ordered_at == after(5)
    assert do(store.order_workers, [one], None) == [one]
    assert rows(Worker).filter(ordered="", ordered_at=None).count() == 2


def test_nothing_takes_back_the_order_to_stop() -> None:
    one = register()
    do(store.order_workers, [one], WorkerOrder.STOP)
    with nothing_written():
        assert do(store.order_workers, [one], WorkerOrder.QUIET) == []
        assert do(store.order_workers, [one], None) == []


def test_workers_that_have_ended_or_are_unknown_take_no_order() -> None:
    one, ended = register(), register()
    do(store.stop_workers, [ended], "stopped")
    assert do(store.order_workers, [one, ended, 10**9], WorkerOrder.STOP) == [one]
    assert do(store.order_workers, [], WorkerOrder.STOP) == []
    assert looks.order_of(10**9) is None
