"""How one queue stands and what one worker had last: exact where it is said to be, on any engine."""

from __future__ import annotations

import pytest

from relay_queue import store
from relay_queue.models import Lease, Queue, Worker
from relay_queue.query import looks, status
from tests.store.actions import (
    Wall,
    ack,
    claim,
    claim_one,
    do,
    enqueue,
    enqueue_each,
    nack,
    register,
    rows,
)

pytestmark = pytest.mark.usefixtures("wall")


def test_queue_stands_as_the_report_of_all_queues_says(wall: Wall) -> None:
    enqueue(queue="other")
    enqueue_each(3, queue="mail")
    nack(claim_one("mail"), fatal=True)
    do(store.set_limits, "mail", capacity=9)
    do(store.pause, "mail")
    wall.advance(90)
    now = looks.now()
    (expected,) = [queue for queue in status.queues(now) if queue.name == "mail"]
    assert status.queue_status(rows(Queue).get(pk="mail"), now) == expected
    assert expected.oldest_wait_seconds == 90
    empty = rows(Queue).get(pk="other")
    ack(claim_one("other"))
    assert status.queue_status(empty, now).oldest_wait_seconds is None


def test_next_in_line_are_those_that_will_be_claimed_next() -> None:
    enqueue_each(3, queue="mail", priority=-5)
    urgent = enqueue(queue="mail", priority=9)
    enqueue(queue="other", priority=50)
    found = status.next_in_line("mail", 3)
    assert found[0] == urgent
    assert found == [held.job_id for held in claim(3, "mail")]


def serve(worker_id: int, count: int) -> list[int]:
    """Let a worker run some jobs; return the ids of its leases."""
    enqueue_each(count)
    found = []
    for held in claim(count, worker_id=worker_id):
        ack(held)
        found.append(held.lease_id)
    return found


def test_last_attempts_of_a_worker_are_found_however_long_ago_it_died(
    wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "LOOKED_AT_FOR_WORKER", 6)
    dead, live, idle = register(), register(), register()
    had = serve(dead, 4)
    for _ in range(5):
        wall.advance(3_600)
        do(store.heartbeat, live, store.Totals())
        has = serve(live, 8)
    rows(Lease).filter(pk__in=range(has[0] - 12, has[0], 2)).delete()  # pruned: ids have gaps
    found = {worker.pk: status.recent_leases(worker, 3) for worker in rows(Worker)}
    assert found[dead] == had[::-1][:3]
    assert found[live] == has[::-1][:3]
    assert found[idle] == []


def test_open_leases_are_not_among_the_last_attempts() -> None:
    worker_id = register()
    assert status.recent_leases(rows(Worker).get(), 3) == [], "the ledger is empty"
    had = serve(worker_id, 1)
    enqueue()
    claim_one(worker_id=worker_id)
    assert status.recent_leases(rows(Worker).get(), 3) == had
