"""Bugs to plant: what a careless hand could make of the store. Each is seen by a rule of the checker.

A plant changes a statement or a function for the length of a block. It fails loudly where the code it
changes is no longer there; it is then to be planted anew.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from django.db import DatabaseError

from relay_queue import store, wakeup
from relay_queue.states import REQUEUEABLE, TRANSITIONS, State
from tests.history.evidence import Violation
from tests.simulation.play import play
from tests.simulation.scratch import Connection, Scratch
from tests.simulation.world import World

# By name: the package shadows some of these modules with the verb of the same name.
claim, enqueue, grant, operate, recover, settle = (
    import_module(f"relay_queue.store.{name}")
    for name in ("claim", "enqueue", "grant", "operate", "recover", "settle")
)

Planting = Callable[[], Any]
"""A context manager that plants the bug and takes it out again."""


class Plant(NamedTuple):
    """A bug, and the rules of which one at least has to see it."""

    planted: Planting
    seen_by: tuple[str, ...]


class Caught(NamedTuple):
    """The first seed in which a bug was seen, and by what."""

    seed: int
    violation: Violation


def first_catch(plant: Plant, scratch: Scratch, most: int) -> Caught | None:
    """Play up to ``most`` seeds from 0 with the bug; return the first that catches it."""
    for seed in range(most):
        with plant.planted():  # once a seed, so that a bug with a memory begins anew
            violations = play(seed, scratch).violations
        for violation in violations:
            if violation.rule in plant.seen_by:
                return Caught(seed, violation)
    return None


@contextmanager
def _rewritten(module: ModuleType, name: str, *changes: tuple[str, str]) -> Iterator[None]:
    statement = getattr(module, name)
    for pattern, replacement in changes:
        statement, found = re.subn(pattern, replacement, statement)
        assert found, f"{module.__name__}.{name} has no {pattern!r}: plant this bug anew"
    with mock.patch.object(module, name, statement):
        yield


def _without(module: ModuleType, name: str, *patterns: str) -> Any:
    """Take conditions out of a statement."""
    return _rewritten(module, name, *((rf"\s+AND\s+{pattern}", " ") for pattern in patterns))


def _idle(module: ModuleType, name: str) -> Any:
    """Let a statement find no row."""
    return _rewritten(module, name, (r"\bWHERE\b", "WHERE 1 = 0 AND"))


def no_token_in_the_guard() -> Any:
    """Whoever knows a lease's id may end it."""
    return _without(settle, "END_LEASES", r"relay_queue_lease\.token = given\.token")


def no_ended_check_in_the_guard() -> Any:
    """A lease that was ended by others can be ended again by its owner."""
    return _without(settle, "END_LEASES", r"relay_queue_lease\.(?:ended_at|outcome) IS NULL")


def no_token_in_renewal() -> Any:
    """Whoever knows a lease's id may extend it."""
    return _without(settle, "RENEW", r"relay_queue_lease\.token = owner\.token")


@contextmanager
def deferred_begin() -> Iterator[None]:
    """Transactions begin without the write lock."""

    def execute(self: Connection, sql: str, *args: Any) -> Any:
        return sqlite3.Connection.execute(self, sql.replace("IMMEDIATE", "DEFERRED"), *args)

    with mock.patch.object(Connection, "execute", execute):
        yield


FIND_OVER = """
    SELECT l.id, j.id, j.queue, j.attempt - j.attempt_base >= j.max_attempts
    FROM relay_queue_lease l JOIN relay_queue_job j ON j.id = l.job_id
    WHERE l.ended_at IS NULL AND l.expires_at <= %s
"""
END_BY_ID = "UPDATE relay_queue_lease SET ended_at = %s, outcome = 'expired' WHERE id = %s"
MOVE_BY_ID = """
    UPDATE relay_queue_job SET state = %s, finished_at = %s WHERE id = %s AND state = 'running'
"""


@contextmanager
def recover_by_id_alone() -> Iterator[None]:
    """A recoverer ends what it once found to be over, whatever became of it since."""
    noted: list[Any] = []

    def recover_expired(tx: store.Transaction, *_: Any, **__: Any) -> list[Any]:
        for lease_id, job_id, queue, exhausted in noted:
            state = State.DEAD if exhausted else State.READY
            tx.execute(END_BY_ID, [tx.now_db, lease_id])
            if tx.execute(MOVE_BY_ID, [state.value, tx.now_db if exhausted else None, job_id]):
                tx.count(queue, State.RUNNING, -1)
                tx.count(queue, state, 1)
        noted[:] = tx.fetch(FIND_OVER, [tx.now_db])
        return []

    with mock.patch.object(store, "recover_expired", recover_expired):
        yield


@contextmanager
def recover_the_living() -> Iterator[None]:
    """A recoverer does not look at the time."""
    with (
        _rewritten(recover, "FIND_EXPIRED", (r"expires_at <= %s", "%s IS NOT NULL")),
        _without(recover, "END_EXPIRED", r"expires_at <= %s(?=\s+RETURNING)"),
        mock.patch.object(recover, "_end", _without_guard(recover._end)),
    ):
        yield


def _without_guard(end: Callable[..., Any]) -> Callable[..., Any]:
    def ended(*args: Any, **options: Any) -> Any:
        guard = options["guard"] if "worker_id" in options["statement"] else []
        return end(*args, **{**options, "guard": guard})

    return ended


UNCHARGE = "UPDATE relay_queue_job SET attempt = attempt - 1 WHERE id = %s AND state <> 'dead'"


@contextmanager
def crashes_are_not_charged() -> Iterator[None]:
    """Only a failure that was told uses up an attempt."""
    with ExitStack() as undo:
        for name in ("recover_expired", "recover_dead"):
            undo.enter_context(mock.patch.object(store, name, _uncharging(getattr(store, name))))
        yield


def _uncharging(verb: Callable[..., Any]) -> Callable[..., Any]:
    def uncharged(tx: store.Transaction, *args: Any, **options: Any) -> Any:
        recovered = verb(tx, *args, **options)
        for lost in recovered:
            tx.execute(UNCHARGE, [lost.job_id])
        return recovered

    return uncharged


@contextmanager
def expiry_by_the_owners_clock() -> Iterator[None]:
    """An owner decides by its own clock, which stood still while its process was stopped."""
    verb = store.settle

    def by_own_clock(tx: store.Transaction, told: Any) -> Any:
        world = Connection.strikes
        assert isinstance(world, World)
        own = tx.dialect.to_db(tx.now - world.turns[-1].actor.slept)
        with mock.patch.object(store.Transaction, "now_db", own):
            return verb(tx, told)

    with mock.patch.object(store, "settle", by_own_clock):
        yield


def tokens_are_reused() -> Any:
    """Every lease gets the same token."""
    return mock.patch.object(grant, "os", SimpleNamespace(urandom=bytes))


@contextmanager
def ack_before_commit() -> Iterator[None]:
    """Callers are told that all went well before it is known."""
    leave = store.transaction.__exit__

    def leave_gladly(self: Any, *exc_info: Any) -> None:
        try:
            leave(self, *exc_info)
        except DatabaseError:
            if exc_info[0] is not None:
                raise

    with mock.patch.object(store.transaction, "__exit__", leave_gladly):
        yield


def ring_before_commit() -> Any:
    """The bell rings while the job cannot be seen yet, and for jobs that are rolled back."""

    def wake_at_once(tx: store.Transaction) -> None:
        wakeup.ring(tx.connection.alias)

    return mock.patch.object(store.Transaction, "wake", wake_at_once)


@contextmanager
def counters_after_commit() -> Iterator[None]:
    """The counters are written in a transaction of their own."""
    flush, leave = store.Transaction.flush, store.transaction.__exit__

    def leave_and_count(self: Any, *exc_info: Any) -> None:
        counts = dict(self._tx._counts)
        self._tx._counts.clear()
        leave(self, *exc_info)
        if exc_info[0] is None and any(counts.values()):
            with store.transaction() as own:
                own._counts.update(counts)
                flush(own)

    with mock.patch.object(store.transaction, "__exit__", leave_and_count):
        yield


def claim_before_due() -> Any:
    """Waiting jobs are woken whatever the time is."""
    return _rewritten(recover, "FIND_DUE", (r"available_at <= %s", "%s IS NOT NULL"))


def refusals_are_not_recorded() -> Any:
    """A late owner is refused, and nobody learns of it."""
    return _idle(settle, "RECORD_REFUSAL")


def cancel_leaves_the_token_valid() -> Any:
    """A cancelled job's lease stays open."""
    return _idle(operate, "CANCEL_LEASES")


@contextmanager
def success_can_be_requeued() -> Iterator[None]:
    """An operator may send a job back that has succeeded."""
    states = REQUEUEABLE | {State.SUCCEEDED}
    onward = {State.SUCCEEDED: frozenset({State.READY})}
    with (
        mock.patch.dict(TRANSITIONS, onward),
        mock.patch.object(operate, "REQUEUEABLE", states),
        _rewritten(operate, "REVIVE", (r"'cancelled'", "'cancelled', 'succeeded'")),
    ):
        yield


def running_jobs_are_not_limited() -> Any:
    """A claim does not look at how many jobs of a queue are running."""
    return _rewritten(claim, "CLAIMABLE", (r"q\.max_running IS NULL", "1 = 1"))


def capacity_is_not_kept() -> Any:
    """A full queue admits more."""
    return mock.patch.object(enqueue, "_admit")


PLANTS: dict[str, Plant] = {
    plant.__name__: Plant(plant, seen_by)
    for plant, seen_by in (
        (no_token_in_the_guard, ("wrong token",)),
        (no_ended_check_in_the_guard, ("ended twice",)),
        (no_token_in_renewal, ("refused took effect",)),
        (deferred_begin, ("busy",)),
        (recover_by_id_alone, ("ended twice", "ack lost")),
        (recover_the_living, ("early",)),
        (crashes_are_not_charged, ("attempt", "budget")),
        (expiry_by_the_owners_clock, ("late",)),
        (tokens_are_reused, ("token reused",)),
        (ack_before_commit, ("lost", "ran unleased", "answer lost", "ack lost")),
        (ring_before_commit, ("early ring",)),
        (counters_after_commit, ("counter",)),
        (claim_before_due, ("before due",)),
        (refusals_are_not_recorded, ("refusal lost",)),
        (cancel_leaves_the_token_valid, ("unleased",)),
        (success_can_be_requeued, ("illegal step",)),
        (running_jobs_are_not_limited, ("running limit",)),
        (capacity_is_not_kept, ("capacity",)),
    )
}
