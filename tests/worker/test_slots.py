"""The places of a worker process: real threads, a real event loop, and what is left behind."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connection, connections
from django.test import override_settings

from relay_queue.compat import signals
from relay_queue.context import JobContext, current_context
from relay_queue.store.records import Claim
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.slots import Slots
from tests import tasks
from tests.conftest import wait_until
from tests.worker.claims import claim_next, claim_of, settle

Make = Callable[[int], Slots]


@pytest.fixture(autouse=True)
def gate() -> Iterator[threading.Event]:
    tasks.calls.clear()
    tasks.gate.clear()
    yield tasks.gate
    tasks.gate.set()


@pytest.fixture
def rings() -> list[str]:
    """The names of the threads that rang, in order."""
    return []


@pytest.fixture
def make(rings: list[str]) -> Iterator[Make]:
    made: list[Slots] = []

    def build(concurrency: int) -> Slots:
        made.append(Slots(concurrency, lambda: rings.append(threading.current_thread().name)))
        return made[-1]

    wait_until(lambda: not slot_threads())  # those of other tests may still be ending
    yield build
    tasks.gate.set()
    for slots in made:
        slots.close()
    wait_until(lambda: not slot_threads(), message=lambda: str(slot_threads()))


@pytest.fixture
def no_log() -> Iterator[None]:
    """Log nothing: receivers log the very texts that not every test report can carry."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def slot_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("relay-slot"))


def start(slots: Slots, *claims: Claim) -> list[Attempt]:
    attempts = [Attempt(claim, JobContext.of(claim)) for claim in claims]
    for attempt in attempts:
        slots.start(attempt)
    return attempts


def claim_with_time() -> Claim:
    """Claim a job from the store, with more time than an atomic function may ask for."""
    (claim,) = claim_next()
    claim.timeout_seconds = 60.0
    return claim


def take(slots: Slots, count: int) -> list[Attempt]:
    taken: list[Attempt] = []
    wait_until(lambda: taken.extend(slots.take_finished()) or len(taken) >= count)
    assert len(taken) == count
    return taken


def results(finished: list[Attempt]) -> dict[int, str | None]:
    return {entry.claim.lease_id: entry.settlement.result for entry in finished}


# --- Places --------------------------------------------------------------------------------


def test_jobs_hold_their_slots_until_their_outcomes_are_taken(make: Make) -> None:
    slots = make(3)
    claims = [claim_of(tasks.add, n) for n in range(3)]
    start(slots, *claims)
    assert (slots.free, slots.busy) == (0, 3)
    wait_until(lambda: slots.has_finished)
    assert slots.free == 0
    finished = take(slots, 3)
    assert results(finished) == {claim.lease_id: str(n) for n, claim in enumerate(claims)}
    assert (slots.free, slots.busy, slots.has_finished) == (3, 0, False)


def test_no_more_jobs_start_than_there_are_slots(make: Make, gate: threading.Event) -> None:
    slots = make(1)
    start(slots, claim_of(tasks.wait))
    with pytest.raises(RuntimeError, match="all 1 slots are taken"):
        start(slots, claim_of(tasks.noop))
    gate.set()
    take(slots, 1)


def test_threads_are_named_started_when_needed_and_reused(
    make: Make, gate: threading.Event
) -> None:
    slots = make(8)
    assert slot_threads() == []
    for _ in range(5):
        start(slots, claim_of(tasks.noop))
        take(slots, 1)
    assert slot_threads() == ["relay-slot-1"]
    attempts = start(slots, *(claim_of(tasks.wait) for _ in range(3)))
    assert slot_threads() == ["relay-slot-1", "relay-slot-2", "relay-slot-3"]
    # Behind an open gate a thread that is slow to start would leave its job to another.
    wait_until(lambda: all(attempt.thread for attempt in attempts))
    gate.set()
    assert set(results(take(slots, 3)).values()) == {
        '"relay-slot-1"',
        '"relay-slot-2"',
        '"relay-slot-3"',
    }


def test_slow_job_holds_up_no_other(make: Make, gate: threading.Event) -> None:
    slots = make(2)
    start(slots, claim_of(tasks.wait))
    for n in range(20):
        start(slots, claim_of(tasks.add, n))
        assert take(slots, 1)[0].settlement.result == str(n)
    gate.set()
    take(slots, 1)


def test_threads_do_not_keep_the_process_from_ending(make: Make, gate: threading.Event) -> None:
    slots = make(2)
    start(slots, claim_of(tasks.wait), claim_of(tasks.wait_async))
    wait_until(lambda: "relay-slot-loop" in slot_threads())
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("relay-slot"))
    gate.set()
    take(slots, 2)


# --- Telling the loop ----------------------------------------------------------------------


def test_loop_is_told_once_until_it_takes(make: Make, rings: list[str]) -> None:
    slots = make(4)
    start(slots, *(claim_of(tasks.noop) for _ in range(4)))
    wait_until(lambda: len(slots._finished) == 4)
    wait_until(lambda: len(rings) == 1)
    assert rings[0].startswith("relay-slot-")
    take(slots, 4)
    start(slots, claim_of(tasks.noop))
    wait_until(lambda: len(rings) == 2)
    take(slots, 1)


def test_no_outcome_goes_untold_while_the_loop_takes(make: Make) -> None:
    """A loop that takes only when it was told gets every one of many outcomes."""
    told = threading.Semaphore(0)
    slots = Slots(4, told.release)
    waiting, done = [claim_of(tasks.noop) for _ in range(1000)], 0
    while done < 1000:
        while slots.free and waiting:
            start(slots, waiting.pop())
        assert told.acquire(timeout=60), f"not told of the rest after {done}"
        done += len(slots.take_finished())
    slots.close()
    wait_until(lambda: not slot_threads())


# --- Stuck ---------------------------------------------------------------------------------


def test_stuck_job_keeps_its_slot_and_its_late_outcome_is_delivered(
    make: Make, gate: threading.Event
) -> None:
    slots = make(2)
    (attempt,) = start(slots, claim_of(tasks.wait))
    never_started = claim_of(tasks.wait)
    slots.mark_stuck(attempt)
    slots.mark_stuck(Attempt(never_started, JobContext.of(never_started)))
    assert (slots.stuck, slots.free) == (1, 1)
    assert slots.stuck_leases() == {attempt.claim.lease_id}
    gate.set()
    assert take(slots, 1)[0].settlement.verb == "ack"
    assert (slots.stuck, slots.free) == (0, 2)


def test_close_lets_a_running_function_finish(make: Make, gate: threading.Event) -> None:
    slots = make(3)
    start(slots, claim_of(tasks.noop), claim_of(tasks.wait))
    take(slots, 1)
    slots.close()
    wait_until(lambda: len(slot_threads()) == 1)
    gate.set()
    take(slots, 1)


def test_cancelled_function_gives_its_slot_back(make: Make) -> None:
    slots = make(1)
    (attempt,) = start(slots, claim_of(tasks.wait_until_cancelled))
    attempt.context.cancel("by an operator")
    assert take(slots, 1)[0].settlement.error == "relay_queue.exceptions.Cancelled"


# --- Crashes -------------------------------------------------------------------------------


def test_poison_never_shrinks_the_pool(make: Make, no_log: None) -> None:
    slots = make(2)
    for kind in [*tasks.POISON, "recursion"]:
        start(slots, claim_of(tasks.poison, kind))
        assert take(slots, 1)[0].settlement.verb == "nack"
    start(slots, claim_of(tasks.add, 1), claim_of(tasks.add, 2))
    assert {f.settlement.result for f in take(slots, 2)} == {"1", "2"}


def test_broken_executor_never_shrinks_the_pool(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise SystemExit("a defect of ours")

    slots = make(1)
    with monkeypatch.context() as patch:
        patch.setattr("relay_queue.worker.slots.begin", broken)
        start(slots, claim_of(tasks.noop))
        assert take(slots, 1)[0].settlement.message == "SystemExit: a defect of ours"
    start(slots, claim_of(tasks.noop))
    assert take(slots, 1)[0].settlement.verb == "ack"


@pytest.mark.parametrize("task", [tasks.fork_and_return, tasks.fork_and_raise])
def test_forked_child_ends_where_the_function_does(make: Make, rings: list[str], task: Any) -> None:
    slots = make(1)
    start(slots, claim_of(task))
    (finished,) = take(slots, 1)
    told = finished.settlement.result or finished.settlement.message.removeprefix("ValueError: ")
    assert os.waitpid(int(told), 0) == (int(told), 0)
    start(slots, claim_of(tasks.noop))
    take(slots, 1)


# --- Coroutines ----------------------------------------------------------------------------


def test_coroutines_share_one_loop_and_hold_slots(make: Make, gate: threading.Event) -> None:
    slots = make(4)
    start(slots, *(claim_of(tasks.wait_async) for _ in range(4)))
    assert slots.free == 0
    gate.set()
    assert set(results(take(slots, 4)).values()) == {'"relay-slot-loop"'}
    assert slots.free == 4


def test_coroutine_past_its_deadline_is_cancelled_and_the_others_go_on(make: Make) -> None:
    slots = make(2)
    late, fine = claim_of(tasks.sleep_async, 60), claim_of(tasks.add_async, 1, 2)
    late.timeout_seconds = 0.01
    start(slots, late, fine)
    outcomes = {f.claim.lease_id: f.settlement for f in take(slots, 2)}
    assert outcomes[late.lease_id].timed_out
    assert outcomes[fine.lease_id].result == "3"


@pytest.mark.parametrize("kind", ["exit", "interrupt", "cancelled", "odd"])
def test_poisoned_coroutine_does_not_stop_the_loop(make: Make, kind: str) -> None:
    slots = make(2)
    start(slots, claim_of(tasks.poison_async, kind))
    assert take(slots, 1)[0].settlement.verb == "nack"
    start(slots, claim_of(tasks.add_async, 1, 2))
    assert take(slots, 1)[0].settlement.result == "3"


def test_child_task_that_exits_does_not_stop_the_loop(make: Make, gate: threading.Event) -> None:
    slots = make(3)
    start(slots, claim_of(tasks.wait_async), claim_of(tasks.exit_in_child_task))
    assert take(slots, 1)[0].settlement.result == "null"
    start(slots, claim_of(tasks.add_async, 1, 2))
    assert take(slots, 1)[0].settlement.result == "3"
    gate.set()
    assert take(slots, 1)[0].settlement.result == '"relay-slot-loop"'


# --- Database connections ------------------------------------------------------------------

LEAVERS = {
    tasks.leave_atomic_open: "nack",
    tasks.leave_atomic_open_async: "nack",
    tasks.begin_by_hand: "nack",
    tasks.turn_autocommit_off: "nack",
    tasks.close_the_handle: "ack",
    tasks.break_the_block: "ack",
}
"""What functions do to their connection, and what their return is worth then."""


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("keep", [0, None], ids=["closed after use", "kept open"])
@pytest.mark.parametrize("leave", LEAVERS, ids=lambda task: task.name)
def test_next_function_finds_a_usable_connection(
    make: Make, leave: Any, keep: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", keep)
    slots = make(1)
    start(slots, claim_of(leave))
    (left,) = take(slots, 1)
    assert left.settlement.verb == LEAVERS[leave]
    if LEAVERS[leave] == "nack":
        assert "left a transaction open on 'default'" in left.settlement.message
    start(slots, claim_of(tasks.create_group, "next"))
    assert take(slots, 1)[0].settlement.verb == "ack"
    assert list(Group.objects.values_list("name", flat=True)) == ["next"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "then",
    ["fail", "exit", "close", "close the handle", "leave a block open", "roll back", "unstorable"],
)
def test_misbehaving_atomic_function_leaves_nothing_behind(make: Make, then: str) -> None:
    tasks.create_group_atomically.enqueue("never", then=then)
    slots = make(1)
    start(slots, claim_with_time())
    (finished,) = take(slots, 1)
    assert (finished.settlement.verb, finished.settled) == ("nack", None)
    assert not Group.objects.exists()
    # A result that cannot be stored would be none the next time either.
    after = "dead" if then == "unstorable" else "retrying"
    assert settle(finished.settlement).state == after
    tasks.create_group_atomically.enqueue("next")
    start(slots, claim_with_time())
    assert take(slots, 1)[0].settled is not None
    assert Group.objects.get().name == "next"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("keep", [0, None], ids=["closed after use", "kept open"])
def test_each_function_has_a_connection_of_its_own_however_long_others_are_kept(
    make: Make, keep: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", keep)
    slots = make(1)
    for _ in range(2):
        start(slots, claim_of(tasks.note_connection))
        take(slots, 1)
    first, second = tasks.calls
    assert first is not second
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        first.execute("SELECT 1")
    tasks.calls.clear()


def test_what_a_receiver_puts_into_the_context_ends_with_the_job(make: Make) -> None:
    tenant: ContextVar[int] = ContextVar("tenant", default=0)
    seen: list[int] = []

    def count(**_: Any) -> None:
        seen.append(tenant.get())
        tenant.set(tenant.get() + 1)

    slots = make(1)
    for signal in (signals.task_started, signals.task_finished):
        signal.connect(count)
    try:
        for _ in range(2):
            start(slots, claim_of(tasks.noop))
            take(slots, 1)
    finally:
        for signal in (signals.task_started, signals.task_finished):
            signal.disconnect(count)
    assert seen == [0, 1, 0, 1]


def test_what_a_function_puts_into_the_context_ends_with_the_job(make: Make) -> None:
    seen: list[tuple[str, int | None]] = []

    def note(**_: Any) -> None:
        job = current_context()
        seen.append((tasks.tenant.get(), None if job is None else job.job_id))

    slots = make(1)
    for signal in (signals.task_started, signals.task_finished):
        signal.connect(note)
    try:
        for _ in range(2):
            start(slots, claim_of(tasks.become_tenant, "one"))
            take(slots, 1)
    finally:
        for signal in (signals.task_started, signals.task_finished):
            signal.disconnect(note)
    assert seen == [("none", None), ("one", None)] * 2, "receivers work for no job"


@pytest.mark.django_db(transaction=True)
def test_log_of_queries_does_not_grow_under_debug(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", None)
    slots = make(1)
    with override_settings(DEBUG=True):
        for _ in range(2):
            start(slots, claim_of(tasks.note_queries))
            take(slots, 1)
    assert tasks.calls == [0, 0]


@pytest.mark.django_db(transaction=True)
def test_connection_of_the_calling_thread_is_left_alone(make: Make) -> None:
    Group.objects.count()
    handle = connection.connection
    slots = make(1)
    start(slots, claim_of(tasks.leave_atomic_open))
    take(slots, 1)
    assert connection.connection is handle
    assert not connection.in_atomic_block


@pytest.mark.django_db(transaction=True)
def test_coroutine_uses_the_database_from_a_slot(make: Make) -> None:
    Group.objects.create(name="one")
    slots = make(2)
    start(slots, claim_of(tasks.count_groups), claim_of(tasks.count_groups))
    assert {f.settlement.result for f in take(slots, 2)} == {"1"}


# --- Too few threads ------------------------------------------------------------------------


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that lets the system give no more threads with such a name."""
    begin = threading.Thread.start

    def deny(name: str) -> None:
        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith(name):
                raise RuntimeError("can't start new thread")
            begin(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)

    return deny


def test_a_job_without_a_thread_goes_back_and_does_not_wait_behind_another(
    make: Make, gate: threading.Event, no_thread: Callable[[str], None]
) -> None:
    slots = make(3)
    start(slots, claim_of(tasks.wait))
    no_thread("relay-slot")
    unrun = claim_of(tasks.noop)
    start(slots, unrun)
    (back,) = take(slots, 1)
    assert (back.claim, back.settlement.verb) == (unrun, "release")
    assert (slots.places, slots.free) == (1, 0)
    gate.set()
    take(slots, 1)
    assert slots.free == 1


def test_a_process_without_any_thread_hands_back_and_tries_again_later(
    make: Make, no_thread: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make(3)
    no_thread("relay-slot")
    start(slots, claim_of(tasks.noop))
    assert [back.settlement.verb for back in take(slots, 1)] == ["release"]
    assert slots.free == 0
    monkeypatch.undo()
    slots._short_until = 0.0
    assert slots.free == 3
    start(slots, claim_of(tasks.noop))
    assert [done.settlement.verb for done in take(slots, 1)] == ["ack"]


def test_coroutines_run_in_their_slots_while_there_is_no_thread_for_them(
    make: Make, no_thread: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make(2)
    no_thread("relay-slot-loop")
    for number in range(2):
        start(slots, claim_of(tasks.add_async, number, 1))
    assert {done.settlement.verb for done in take(slots, 2)} == {"ack"}
    monkeypatch.undo()
    start(slots, claim_of(tasks.add_async, 2, 1))
    take(slots, 1)
    assert "relay-slot-loop" in slot_threads()
