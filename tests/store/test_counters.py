"""The counters equal the jobs, after everything, joined or alone, committed or rolled back."""

from __future__ import annotations

import pytest
from django.db import Error
from django.test.utils import CaptureQueriesContext

from relay_queue import store
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job, QueueCount
from relay_queue.operations import REQUEUE
from relay_queue.query import looks
from relay_queue.store import Settlement
from relay_queue.store.queues import recount
from tests.store.actions import (
    Wall,
    ack,
    after,
    assert_counters_exact,
    atomic,
    cancel,
    claim,
    claim_one,
    connection,
    counted,
    do,
    enqueue,
    enqueue_each,
    job,
    nack,
    register,
    rolled_back,
    rows,
)

pytestmark = pytest.mark.usefixtures("wall")


def test_a_whole_life_is_counted_at_every_step(wall: Wall) -> None:
    job_id = enqueue(run_after=after(1), max_attempts=2)
    assert counted() == {("default", "scheduled"): 1}
    wall.advance(1)
    do(store.promote)
    assert counted() == {("default", "ready"): 1}
    held = claim_one()
    assert counted() == {("default", "running"): 1}
    nack(held, delay_seconds=0)
    assert counted() == {("default", "retrying"): 1}
    do(store.promote)
    nack(claim_one())
    assert counted() == {("default", "dead"): 1}
    do(REQUEUE.change_one, job_id)
    assert counted() == {("default", "ready"): 1}
    cancel(job_id)
    assert counted() == {("default", "cancelled"): 1}
    wall.advance(1)
    do(store.prune, "cancelled", wall.now)
    assert counted() == {}
    assert all(row.n == 0 for row in rows(QueueCount))


def test_each_queue_is_counted_by_itself() -> None:
    do(store.enqueue_many, [job(queue=q) for q in "aabbbc"])
    claim(4, "a", "b")
    assert counted() == {
        ("a", "running"): 2,
        ("b", "running"): 2,
        ("b", "ready"): 1,
        ("c", "ready"): 1,
    }


def test_a_batch_of_every_verb_in_one_transaction_is_counted_once(wall: Wall) -> None:
    enqueue_each(6)
    held = claim(5)
    with store.transaction() as tx:
        words = ("ack", "nack", "snooze", "release", "ack")
        store.settle(
            tx,
            [Settlement(w, c.lease_id, c.token) for w, c in zip(words, held, strict=True)],  # type: ignore[arg-type]
        )
        store.promote(tx)
        store.enqueue_many(tx, [job(), job(queue="mail")])
        store.cancel(tx, [held[3].job_id])
        store.claim(tx, worker_id=None, queues=["default", "mail"], limit=2)
        store.requeue(tx, [held[3].job_id])
    assert_counters_exact()


def test_what_is_rolled_back_is_not_counted(wall: Wall) -> None:
    enqueue_each(3)
    claim_one()
    before = counted()
    with rolled_back() as tx:
        store.enqueue(tx, job())
        store.claim(tx, worker_id=None, queues=["default"], limit=2)
    assert counted() == before
    with rolled_back():
        enqueue()
        ack(claim_one())
    assert counted() == before
    assert_counters_exact()


def test_a_joined_transaction_that_fails_takes_only_its_own_counts_with_it() -> None:
    do(store.set_limits, "mail", capacity=1, max_running=None)
    with atomic():
        enqueue()
        enqueue(queue="mail")
        with pytest.raises(QueueFull):
            do(store.enqueue_many, [job(), job(queue="mail")])
        with rolled_back() as tx:
            store.claim(tx, worker_id=None, queues=["default", "mail"], limit=2)
        enqueue()
    assert counted() == {("default", "ready"): 2, ("mail", "ready"): 1}
    assert_counters_exact()


def test_a_nested_transaction_inside_an_open_one_is_counted_with_it() -> None:
    with store.transaction() as outer:
        store.enqueue(outer, job())
        with store.transaction() as inner:
            store.enqueue(inner, job())
        with rolled_back() as undone:
            store.enqueue(undone, job())
        store.enqueue(outer, job())
    assert counted() == {("default", "ready"): 3}
    assert_counters_exact()


def test_with_autocommit_off_the_callers_commit_decides() -> None:
    connection().set_autocommit(False)
    try:
        enqueue()  # before any other statement
        connection().rollback()
        rows(QueueCount).create(queue="the callers own row", state="ready", n=0)
        enqueue()
        connection().rollback()
        rows(QueueCount).create(queue="the callers own row", state="ready", n=0)
        kept = enqueue()
        connection().commit()
        also_kept = enqueue()
        connection().commit()
    finally:
        connection().rollback()
        connection().set_autocommit(True)
    assert set(rows(Job).values_list("id", flat=True)) == {kept, also_kept}
    assert_counters_exact()


def test_connection_that_is_closed_inside_a_transaction_is_fit_for_the_next_one() -> None:
    def close() -> None:
        with store.transaction() as tx:
            store.enqueue(tx, job())
            connection().close()

    with pytest.raises(Error):
        close()
    assert not rows(Job).exists()
    enqueue()
    assert_counters_exact()


def test_altered_and_lost_jobs_are_counted_where_they_went(wall: Wall) -> None:
    ids = enqueue_each(4, max_attempts=1)
    enqueue_each(4, max_attempts=5)
    rows(Job).filter(pk__in=ids[:2]).update(payload="{}")
    worker_id = register()
    claim(8, worker_id=worker_id)
    assert counted() == {("default", "dead"): 2, ("default", "running"): 6}
    do(store.recover_dead, [worker_id])
    assert counted() == {("default", "dead"): 4, ("default", "ready"): 4}
    assert_counters_exact()


def test_a_recount_repairs_counters_that_something_else_has_spoilt() -> None:
    enqueue_each(3)
    enqueue(queue="other")
    claim_one()
    rows(QueueCount).filter(queue="default").update(n=99)
    rows(QueueCount).create(queue="default", state="dead", n=5)
    assert do(recount, "default") == {"ready": 2, "running": 1}
    assert_counters_exact()
    assert do(recount, "empty") == {}


def test_a_recount_after_other_verbs_in_its_transaction_is_exact() -> None:
    with store.transaction() as tx:
        store.enqueue(tx, job())
        recount(tx, "default")
        store.enqueue(tx, job())
    assert_counters_exact()


def test_the_query_log_of_debug_mode_changes_nothing(wall: Wall) -> None:
    with CaptureQueriesContext(connection()) as log:
        enqueue_each(2, args=["100%", "%s", "?"])
        do(store.enqueue_many, [job(args=["100%", "%s", "?"], idempotency_key="%s")])
        held = claim(3)
        assert do(store.renew, [(c.lease_id, c.token, 60.0) for c in held])
        assert ack(held[0]).accepted
        nack(held[1], message="100% of ?", delay_seconds=0)
        do(store.promote)
        cancel(held[2].job_id)
        wall.advance(999)
        do(store.recover_expired)
        do(store.prune, "succeeded", wall.now)
        assert looks.read_queues().ready == {"default"}
    assert_counters_exact()
    assert any("relay_queue_lease" in query["sql"] for query in log)
