"""Queues: rows made on first use, limits, pauses, and what a loop reads of them."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from relay_queue import store
from relay_queue.exceptions import InvalidJob, QueueInUse, UnknownQueue
from relay_queue.models import Queue, QueueCount
from relay_queue.operations import REQUEUE
from relay_queue.query import looks
from relay_queue.states import TERMINAL
from relay_queue.store import queues
from tests.store.actions import (
    START,
    Wall,
    ack,
    after,
    assert_counters_exact,
    cancel,
    claim,
    claim_one,
    do,
    enqueue,
    enqueue_each,
    job,
    nack,
    nothing_written,
    register,
    rows,
    snooze,
)

pytestmark = pytest.mark.usefixtures("wall")

# Not by name: the package has a verb of this name.
claiming = import_module("relay_queue.store.claim")


def test_ensuring_a_queue_creates_it_once_and_changes_it_never(wall: Wall) -> None:
    do(store.ensure_queue, "mail")
    do(store.set_limits, "mail", capacity=3, max_running=1)
    wall.advance(1)
    with nothing_written():
        do(store.ensure_queue, "mail")
    stored = rows(Queue).get(pk="mail")
    assert (stored.aging_seconds, stored.paused_at, stored.created_at) == (60.0, None, START)


def test_a_pause_keeps_the_time_of_the_first(wall: Wall) -> None:
    do(store.pause, "mail")
    wall.advance(5)
    do(store.pause, "mail")
    assert rows(Queue).get(pk="mail").paused_at == START
    do(store.resume, "mail")
    assert rows(Queue).get(pk="mail").paused_at is None
    do(store.pause, "mail")
    assert rows(Queue).get(pk="mail").paused_at == after(5)


def test_limits_are_replaced_together(wall: Wall) -> None:
    do(store.set_limits, "mail", capacity=3, max_running=1)
    do(store.set_limits, "mail", capacity=None, max_running=7)
    stored = rows(Queue).get(pk="mail")
    assert (stored.capacity, stored.max_running) == (None, 7)


BAD_LIMITS = [-1, 2**31, 1.5, "3", True, 10**5000]


@pytest.mark.parametrize("value", BAD_LIMITS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("name", ["capacity", "max_running"])
def test_a_limit_out_of_bounds_is_refused(name: str, value: Any) -> None:
    limits = {"capacity": None, "max_running": None, name: value}
    with nothing_written(), pytest.raises(InvalidJob, match=name):
        do(store.set_limits, "mail", **limits)


BAD_NAMES: list[Any] = ["", "q" * 101, "a,b", " a", "a\n", "\ud800", "a\x00", None, 7, b"a", ("a",)]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda v: type(v).__name__)
def test_no_verb_creates_a_queue_with_an_impossible_name(name: Any) -> None:
    verbs = (store.ensure_queue, store.pause, store.resume)
    for verb in verbs:
        with nothing_written(), pytest.raises(InvalidJob):
            do(verb, name)
    with nothing_written(), pytest.raises(InvalidJob):
        do(store.set_limits, name, capacity=1, max_running=1)
    with nothing_written(), pytest.raises(InvalidJob):
        store.rerank(name, 5.0)


@pytest.mark.parametrize("value", [10**5000, "q" * 10**6], ids=["huge integer", "megabyte"])
@pytest.mark.parametrize(
    "option",
    ["queue", "task", "backend", "idempotency_key"],
)
def test_a_monstrous_name_is_refused_in_a_short_message(option: str, value: Any) -> None:
    with nothing_written(), pytest.raises(InvalidJob) as refused:
        enqueue(**{option: value})
    assert len(str(refused.value)) < 1_000


def test_verbs_on_a_queue_that_the_settings_do_not_list_are_refused(settings: Any) -> None:
    settings.RELAY = {**settings.RELAY, "QUEUES": ["mail"]}
    for verb in (store.ensure_queue, store.pause, store.resume):
        with nothing_written(), pytest.raises(UnknownQueue, match="mail"):
            do(verb, "gone")
    with nothing_written(), pytest.raises(UnknownQueue):
        do(store.set_limits, "gone", capacity=1, max_running=None)


def test_jobs_of_a_queue_taken_from_the_settings_can_still_be_finished(settings: Any) -> None:
    first, second = enqueue_each(2, queue="gone")
    held = claim_one("gone")
    settings.RELAY = {**settings.RELAY, "QUEUES": ["mail"]}
    nack(held, fatal=True)
    do(REQUEUE.change_one, first)
    assert [c.job_id for c in claim(5, "gone", "mail")] == [first, second]


def test_a_claim_creates_no_queue_and_minds_no_unknown_one(settings: Any) -> None:
    settings.RELAY = {**settings.RELAY, "QUEUES": ["mail"]}
    with nothing_written():
        assert claim(5, "mail", "gone", "", "a,b") == []


# --- the read side -----------------------------------------------------------------------------


def test_a_look_tells_what_there_is_to_do(wall: Wall) -> None:
    enqueue(queue="ready")
    enqueue(queue="later", run_after=after(50))
    enqueue(queue="later", run_after=after(40))
    enqueue(queue="running", lease_seconds=30)
    enqueue(queue="running", lease_seconds=20)
    claim(2, "running")
    enqueue(queue="paused")
    do(store.pause, "paused")
    do(store.set_limits, "running", capacity=None, max_running=2)
    look = looks.read_queues()
    assert look.queues == ["later", "paused", "ready", "running"]
    assert (look.ready, look.limited) == ({"ready"}, {"running"})
    assert (look.next_due_at, look.next_expiry_at) == (after(40), after(20))
    assert looks.ready_queues() == {"ready"}


def test_a_look_at_nothing_sees_nothing() -> None:
    look = looks.read_queues()
    assert (look.queues, look.ready, look.limited) == ([], set(), set())
    assert (look.next_due_at, look.next_expiry_at) == (None, None)


def test_finished_jobs_and_ended_leases_are_not_looked_at(wall: Wall) -> None:
    enqueue()
    ack(claim_one())
    cancel(enqueue(run_after=after(5)))
    look = looks.read_queues()
    assert (look.ready, look.next_due_at, look.next_expiry_at) == (set(), None, None)
    assert looks.busy_queues() == set()


def test_a_queue_is_busy_while_jobs_are_ready_running_or_between_attempts(wall: Wall) -> None:
    assert looks.busy_queues() == set()
    enqueue(run_after=after(5))
    assert looks.busy_queues() == set(), "a job for later keeps nobody waiting"
    enqueue()
    assert looks.busy_queues() == {"default"}
    held = claim_one()
    assert looks.busy_queues() == {"default"}
    nack(held)
    assert looks.busy_queues() == {"default"}
    do(store.pause, "default")
    assert looks.busy_queues() == set()


def test_a_queue_is_busy_for_the_backends_of_its_jobs_alone(wall: Wall) -> None:
    enqueue(queue="ready", backend="mine")
    enqueue(queue="running", backend="mine")
    claim_one("running")
    enqueue(queue="retrying", backend="mine")
    nack(claim_one("retrying"))
    enqueue(queue="later", backend="mine", run_after=after(5))
    enqueue(queue="others", backend="other")
    assert looks.busy_queues(["mine"]) == {"ready", "running", "retrying"}
    assert looks.busy_queues(["other"]) == {"others"}
    assert looks.busy_queues(["mine", "other"]) == {"ready", "running", "retrying", "others"}


def test_a_retry_is_the_next_that_is_due(wall: Wall) -> None:
    enqueue(run_after=after(50))
    enqueue()
    nack(claim_one(), delay_seconds=7)
    assert looks.read_queues().next_due_at == after(7)


def test_of_some_leases_the_open_ones_are_told(wall: Wall) -> None:
    enqueue_each(4)
    held = claim(3)
    ids = [c.lease_id for c in held]
    assert looks.open_leases([]) == set()
    assert looks.open_leases([*ids[:2], 10**9]) == set(ids[:2])
    ack(held[0])
    cancel(held[1].job_id)
    assert looks.open_leases(ids) == {ids[2]}


def test_live_workers_are_those_that_have_not_stopped(wall: Wall) -> None:
    mine, other, stopped = register(), register(lock_device=9, lock_inode=8), register()
    do(store.stop_workers, [stopped], "drained")
    (found,) = looks.live_workers(but=mine)
    assert (found.worker_id, found.lock_device, found.lock_inode) == (other, 9, 8)


def test_live_workers_come_in_a_ring_and_only_if_their_end_can_be_proven(wall: Wall) -> None:
    ids = [register() for _ in range(30)]
    register(lock_device=None, lock_inode=None)
    for mine in (ids[0], ids[20], ids[-1]):
        place = ids.index(mine)
        ring = [worker.worker_id for worker in looks.live_workers(but=mine)]
        assert ring == ids[place + 1 :] + ids[:place]
    assert [worker.worker_id for worker in looks.live_workers(but=0)] == ids


def test_limit_that_is_not_named_stays() -> None:
    do(store.set_limits, "mail", capacity=5, max_running=2)
    do(store.set_limits, "mail", max_running=None)
    assert do(store.hold_limits, "mail") == {"capacity": 5, "max_running": None}
    do(store.set_limits, "mail", capacity=0)
    assert do(store.hold_limits, "mail") == {"capacity": 0, "max_running": None}


@pytest.mark.parametrize("limits", [{}, {"aging_seconds": 1}, {"capacity": 1, "name": 2}])
def test_other_limits_than_there_are_cannot_be_set(limits: dict[str, int]) -> None:
    with nothing_written(), pytest.raises(TypeError, match="name capacity or max_running"):
        do(store.set_limits, "mail", **limits)


def test_what_is_remembered_of_a_queue_is_of_one_database() -> None:
    enqueue()
    claim()
    with store.transaction() as tx:
        elsewhere = SimpleNamespace(connection=SimpleNamespace(alias="elsewhere"))
        assert queues.guessed_limits(tx, "default") is not None
        assert queues.guessed_limits(elsewhere, "default") is None  # type: ignore[arg-type]
        assert claiming._single_queue(tx, ["default"], None) is not None
        assert claiming._single_queue(elsewhere, ["default"], None) is None  # type: ignore[arg-type]


# --- A queue is deleted ------------------------------------------------------------------------


def prune_all(tx: store.Transaction) -> None:
    for state in TERMINAL:
        store.prune(tx, state, tx.now + timedelta(seconds=1), 100)


def test_a_queue_without_jobs_is_deleted_with_its_limits_and_made_anew_by_an_enqueue() -> None:
    enqueue(queue="mail")
    ack(claim_one("mail"))
    do(prune_all)
    do(store.set_limits, "mail", capacity=3, max_running=1)
    do(store.pause, "mail")
    assert do(store.delete_queue, "mail") is True
    assert not rows(Queue).exists()
    assert not rows(QueueCount).exists()
    enqueue(queue="mail")
    stored = rows(Queue).get(pk="mail")
    assert (stored.capacity, stored.max_running, stored.paused_at) == (None, None, None)
    assert claim_one("mail").queue == "mail"
    assert_counters_exact()


def test_a_queue_with_a_job_in_any_state_is_not_deleted() -> None:
    for name, spoil in (
        ("ready", lambda: None),
        ("scheduled", lambda: snooze(claim_one("scheduled"), 60)),
        ("running", lambda: claim_one("running")),
        ("retrying", lambda: nack(claim_one("retrying"))),
        ("succeeded", lambda: ack(claim_one("succeeded"))),
        ("dead", lambda: nack(claim_one("dead"), fatal=True)),
    ):
        enqueue(queue=name)
        spoil()
        with nothing_written(), pytest.raises(QueueInUse, match=f"it has 1 {name}") as refused:
            do(store.delete_queue, name)
        assert (refused.value.queue, refused.value.jobs) == (name, {name: 1})
    cancel(enqueue(queue="cancelled"))
    with nothing_written(), pytest.raises(QueueInUse, match="it has 1 cancelled"):
        do(store.delete_queue, "cancelled")
    assert_counters_exact()


def test_a_queue_that_is_not_there_is_not_deleted_and_not_made() -> None:
    with nothing_written():
        assert do(store.delete_queue, "mail") is False
    with pytest.raises(InvalidJob, match="queue name"):
        do(store.delete_queue, "")


def test_a_queue_that_the_settings_do_not_list_any_more_can_be_deleted(settings: Any) -> None:
    do(store.ensure_queue, "old")
    settings.RELAY = {**settings.RELAY, "QUEUES": ["new"]}
    assert do(store.delete_queue, "old") is True


def test_a_queue_whose_last_job_goes_in_the_same_transaction_leaves_no_counter() -> None:
    enqueue(queue="mail")
    ack(claim_one("mail"))

    def prune_and_delete(tx: store.Transaction) -> bool:
        prune_all(tx)
        return store.delete_queue(tx, "mail")

    assert do(prune_and_delete) is True
    assert not rows(QueueCount).exists()
    assert_counters_exact()


def test_a_job_that_was_enqueued_in_the_same_transaction_keeps_its_queue() -> None:
    def enqueue_and_delete(tx: store.Transaction) -> None:
        store.enqueue(tx, job(queue="mail"))
        store.delete_queue(tx, "mail")

    with nothing_written(), pytest.raises(QueueInUse):
        do(enqueue_and_delete)
