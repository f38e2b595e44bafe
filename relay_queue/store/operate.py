"""What an operator may do to jobs. Each verb says what it changed and what it skipped.

A verb that lost a race, because the job had moved on, skips that job and names its state. Where
many write at once, a verb that needs a job and its lease locks the lease first. So does a
settlement, and two that lock in the same order never deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from django.db import transaction as django_transaction

from relay_queue import validation
from relay_queue.exceptions import QueueFull
from relay_queue.ranking import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    rank,
)
from relay_queue.states import (
    CANCELLABLE,
    DISCARDABLE,
    NOT_DUE,
    RELEASABLE,
    REQUEUEABLE,
    WAITING,
    State,
    sql_list,
)
from relay_queue.store.dialects import marks
from relay_queue.store.prune import delete_finished
from relay_queue.store.queues import queue_aging, queue_limits
from relay_queue.store.records import Changed
from relay_queue.store.settle import Step, move, read_running
from relay_queue.store.transaction import Transaction
from relay_queue.store.transitions import moved_apart

READ_JOBS = """
    SELECT id, queue, state, priority, available_at FROM relay_queue_job
    WHERE id IN ({ids}) ORDER BY id{lock}
"""
"""Read what decides whether a verb applies."""

OPEN_LEASES = """
    SELECT id FROM relay_queue_lease
    WHERE job_id IN ({ids}) AND ended_at IS NULL ORDER BY id{lock}
"""
"""Find the leases under which jobs run."""

LOCK_LEASES = "LOCK TABLE relay_queue_lease IN EXCLUSIVE MODE"
"""Wait for all transactions that write or lock leases, and keep them out. Reading is not
hindered."""

CANCEL = f"""
    UPDATE relay_queue_job SET state = 'cancelled', finished_at = %s
    WHERE id IN ({{ids}}) AND state IN ({sql_list(CANCELLABLE)})
"""
"""Cancel unfinished jobs."""

CANCEL_LEASES = """
    UPDATE relay_queue_lease SET ended_at = %s, outcome = 'cancelled'
    WHERE job_id IN ({ids}) AND ended_at IS NULL
"""
"""Void the tokens of jobs that are being cancelled."""

RELEASE_LEASES = """
    UPDATE relay_queue_lease SET ended_at = %s, outcome = 'released'
    WHERE job_id IN ({ids}) AND ended_at IS NULL
    RETURNING job_id
"""
"""Void the tokens of running jobs; the attempts are not charged."""

REVIVE = f"""
    UPDATE relay_queue_job
    SET state = 'ready', attempt_base = attempt, losses = 0, available_at = %s, rank = %s,
        finished_at = NULL
    WHERE id = %s AND state IN ({sql_list(REQUEUEABLE)})
"""
"""Give one dead or cancelled job a fresh budget and a place in its queue."""

RUN_NOW = f"""
    UPDATE relay_queue_job SET state = 'ready', available_at = %s, rank = %s
    WHERE id = %s AND state IN ({sql_list(NOT_DUE)})
"""
"""Make one waiting job ready before its time."""

SET_PRIORITY = f"""
    UPDATE relay_queue_job SET priority = %s, rank = %s
    WHERE id = %s AND state IN ({sql_list(WAITING)})
"""
"""Change the class of one job that does not run."""

BATCH: Final = 1000
"""Rows that one transaction of ours touches at the most."""

_Row = tuple[int, str, str, int, Any]


def lock_jobs(tx: Transaction, job_ids: Sequence[int], *, leases: bool) -> list[tuple[Any, ...]]:
    """Return the rows of ``READ_JOBS``; they stay as they are until the commit.

    With ``leases``, so do the open leases of these jobs.
    """
    ids, lock = marks(len(job_ids)), tx.dialect.lock_rows
    read_jobs = READ_JOBS.format(ids=ids, lock=lock)
    if not lock or not leases:
        return tx.fetch(read_jobs, job_ids)
    while True:
        with suppress(_ClaimedMeanwhile), django_transaction.atomic(using=tx.connection.alias):
            held = tx.fetch(OPEN_LEASES.format(ids=ids, lock=lock), job_ids)
            rows = tx.fetch(read_jobs, job_ids)
            if tx.fetch(OPEN_LEASES.format(ids=ids, lock=""), job_ids) != held:
                raise _ClaimedMeanwhile
            return rows


def lock_lease_table(tx: Transaction) -> None:
    """Lock all leases until the commit, once no other transaction writes or locks one."""
    if tx.dialect.lock_rows:
        tx.execute(LOCK_LEASES)


class _ClaimedMeanwhile(Exception):
    """A job was claimed between the two locks. Both are let go, and its lease is locked first."""


def cancel(tx: Transaction, job_ids: Sequence[int]) -> Changed:
    """Cancel unfinished jobs at once, running ones included: their tokens are void."""
    rows, changed = _select(tx, job_ids, CANCELLABLE)
    if rows:
        ids = [row[0] for row in rows]
        listed = marks(len(ids))
        tx.execute(CANCEL_LEASES.format(ids=listed), [tx.now_db, *ids])
        tx.execute(CANCEL.format(ids=listed), [tx.now_db, *ids])
        moved_apart(tx, ((*row[:3], State.CANCELLED) for row in rows))
        tx.wake()  # a running function must be cancelled, and there may be room for another job
    return changed


def requeue(tx: Transaction, job_ids: Sequence[int]) -> Changed:
    """Move dead and cancelled jobs back to ready with a fresh budget.

    Raises `QueueFull` if a queue has no room for all of them; nothing is changed then.
    """
    rows, changed = _select(tx, job_ids, REQUEUEABLE)
    wanted: dict[str, int] = {}
    for _, queue, *_rest in rows:
        wanted[queue] = wanted.get(queue, 0) + 1
    for queue in sorted(wanted):
        limits = queue_limits(tx, queue)
        if limits.capacity is not None and limits.unfinished + wanted[queue] > limits.capacity:
            raise QueueFull(queue, limits.capacity, wanted[queue])
    _rerank_each(tx, rows, REVIVE)
    return changed


def run_now(tx: Transaction, job_ids: Sequence[int], states: frozenset[State] = NOT_DUE) -> Changed:
    """Make scheduled and retrying jobs ready before their time; the budget stays as it is.

    ``states`` narrows it to one of the two.
    """
    rows, changed = _select(tx, job_ids, NOT_DUE & states)
    _rerank_each(tx, rows, RUN_NOW)
    return changed


def set_priority(tx: Transaction, job_ids: Sequence[int], priority: int) -> Changed:
    """Change the class of jobs that wait; their waiting time goes on counting."""
    priority = validation.require_int("priority", priority, MIN_PRIORITY, MAX_PRIORITY)
    rows, changed = _select(tx, job_ids, WAITING)
    for job_id, queue, _state, _priority, available_at in rows:
        aging = queue_aging(tx, queue)
        new_rank = rank(tx.dialect.from_db(available_at), priority, aging)
        tx.execute(SET_PRIORITY, [priority, new_rank, job_id])
    return changed


def discard(tx: Transaction, job_ids: Sequence[int]) -> Changed:
    """Delete dead letters and their ledger for good.

    One transaction deletes a bounded number of leases. The jobs that it had no room for are
    ``left``: call it again with them, in a transaction of its own.
    """
    rows, changed = _select(tx, job_ids, DISCARDABLE)
    changed.leave(row[0] for row in rows[delete_finished(tx, rows, State.DEAD) :])
    return changed


def release_leases(tx: Transaction, job_ids: Sequence[int]) -> Changed:
    """Take running jobs from their owners and make them ready, uncharged.

    Their functions may still be running: the next attempt can overlap with them.
    """
    rows, changed = _select(tx, job_ids, RELEASABLE)
    if rows:
        ids = [row[0] for row in rows]
        ended = tx.fetch(RELEASE_LEASES.format(ids=marks(len(ids))), [tx.now_db, *ids])
        steps = [Step(job, State.READY) for job in read_running(tx, [row[0] for row in ended])]
        for step in steps:
            step.attempt -= 1
            step.losses = step.job.losses
        move(tx, steps)
        tx.wake()
    return changed


def _select(
    tx: Transaction, job_ids: Sequence[int], states: frozenset[State]
) -> tuple[list[_Row], Changed]:
    """Split jobs into those in one of the states, those that are skipped, and unknown ids."""
    ids = validation.valid_ids(job_ids)
    if len(ids) > BATCH:
        raise ValueError(f"{len(ids)} jobs in one transaction; at most {BATCH}. Work in batches.")
    changed = Changed()
    rows: list[Any] = []
    if ids:
        for row in lock_jobs(tx, ids, leases=State.RUNNING in states):
            if row[2] in states:
                rows.append(row)
                changed.job_ids.append(row[0])
                changed.before[row[0]] = row[2]
            else:
                changed.skipped[row[0]] = row[2]
    known = {*changed.job_ids, *changed.skipped}
    changed.missing.extend(job_id for job_id in dict.fromkeys(job_ids) if job_id not in known)
    return rows, changed


def _rerank_each(tx: Transaction, rows: Sequence[_Row], statement: str) -> None:
    """Make jobs ready as of now, each with the rank of its class."""
    for job_id, queue, _state, priority, _available_at in rows:
        aging = queue_aging(tx, queue)
        tx.execute(statement, [tx.now_db, rank(tx.now, priority, aging), job_id])
    moved_apart(tx, ((*row[:3], State.READY) for row in rows))
    if rows:
        tx.wake()
