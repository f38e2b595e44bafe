"""What an operator may do to jobs and queues. Each verb says what it changed and what it skipped.

A verb that lost a race, because the job had moved on, skips that job and names its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from relay_queue.exceptions import QueueFull
from relay_queue.ranking import (
    MAX_AGING_SECONDS,
    MAX_PRIORITY,
    MIN_AGING_SECONDS,
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
)
from relay_queue.store import bounds
from relay_queue.store.hold import hold
from relay_queue.store.queues import queue_aging, queue_limits, queue_name
from relay_queue.store.records import Changed
from relay_queue.store.settle import Step, move, read_running
from relay_queue.store.transaction import Transaction, transaction

CANCEL = """
    UPDATE relay_queue_job SET state = 'cancelled', finished_at = %s
    WHERE id IN ({ids}) AND state IN ('scheduled', 'ready', 'running', 'retrying')
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

REVIVE = """
    UPDATE relay_queue_job
    SET state = 'ready', attempt_base = attempt, losses = 0, available_at = %s, rank = %s,
        finished_at = NULL
    WHERE id = %s AND state IN ('dead', 'cancelled')
"""
"""Give one dead or cancelled job a fresh budget and a place in its queue."""

RUN_NOW = """
    UPDATE relay_queue_job SET state = 'ready', available_at = %s, rank = %s
    WHERE id = %s AND state IN ('scheduled', 'retrying')
"""
"""Make one waiting job ready before its time."""

SET_PRIORITY = """
    UPDATE relay_queue_job SET priority = %s, rank = %s
    WHERE id = %s AND state IN ('scheduled', 'ready', 'retrying')
"""
"""Change the class of one job that does not run."""

DELETE_LEASES = "DELETE FROM relay_queue_lease WHERE job_id IN ({ids})"
"""Delete the ledger of jobs that are about to be deleted."""

DELETE_DEAD = "DELETE FROM relay_queue_job WHERE id IN ({ids}) AND state = 'dead'"
"""Delete dead letters."""

PAUSE = """
    UPDATE relay_queue_queue SET paused_at = %s, updated_at = %s
    WHERE name = %s AND paused_at IS NULL
"""
"""Stop claims from a queue; the first pause keeps its time."""

RESUME = """
    UPDATE relay_queue_queue SET paused_at = NULL, updated_at = %s
    WHERE name = %s AND paused_at IS NOT NULL
"""
"""Allow claims from a queue."""

READ_LIMITS = "SELECT capacity, max_running FROM relay_queue_queue WHERE name = %s{lock}"
"""Read the limits of a queue, and keep others from changing them."""

SET_LIMITS = "UPDATE relay_queue_queue SET {limits}, updated_at = %s WHERE name = %s"
"""Replace limits of a queue."""

SET_AGING = "UPDATE relay_queue_queue SET aging_seconds = %s, updated_at = %s WHERE name = %s"
"""Replace the aging of a queue; the ranks follow in batches."""

NEXT_RANKS = """
    SELECT id, priority, available_at FROM relay_queue_job
    WHERE queue = %s AND id > %s AND state NOT IN ('succeeded', 'dead', 'cancelled')
    ORDER BY id LIMIT %s
"""
"""Read the next unfinished jobs of a queue by id."""

SET_RANK = """
    WITH new (job_id, rank) AS ({rows})
    UPDATE relay_queue_job SET rank = new.rank FROM new WHERE relay_queue_job.id = new.job_id
"""
"""Rewrite ranks."""

RANK_CASTS = ("bigint", "bigint")

RECOUNT = """
    SELECT state, COUNT(*) FROM relay_queue_job WHERE queue = %s GROUP BY state
"""
"""Count a queue's jobs by state: reads all of them."""

FORGET_COUNTS = "DELETE FROM relay_queue_queuecount WHERE queue = %s"
"""Drop the counters of a queue, to be written anew in the same transaction."""

BATCH: Final = 1000
"""Rows that one transaction of ours touches at the most."""

LIMITS: Final = ("capacity", "max_running")
"""The limits of a queue, which are columns of its row."""

MAX_LIMIT: Final = 2**31 - 1
"""The largest capacity or number of running jobs that the columns hold."""

_Row = tuple[int, str, str, int, Any]


def cancel(tx: Transaction, job_ids: Sequence[int]) -> Changed:
    """Cancel unfinished jobs at once, running ones included: their tokens are void."""
    rows, changed = _select(tx, job_ids, CANCELLABLE)
    if rows:
        ids = [row[0] for row in rows]
        marks = _marks(ids)
        tx.execute(CANCEL_LEASES.format(ids=marks), [tx.now_db, *ids])
        tx.execute(CANCEL.format(ids=marks), [tx.now_db, *ids])
        for _, queue, state, *_rest in rows:
            tx.move(queue, state, State.CANCELLED)
        tx.wake()  # a function that runs is to hear of it, and there may be room for another
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
    priority = bounds.whole("priority", priority, MIN_PRIORITY, MAX_PRIORITY)
    rows, changed = _select(tx, job_ids, WAITING)
    for job_id, queue, _state, _priority, available_at in rows:
        aging = queue_aging(tx, queue)
        new_rank = rank(tx.dialect.from_db(available_at), priority, aging)
        tx.execute(SET_PRIORITY, [priority, new_rank, job_id])
    return changed


def discard(tx: Transaction, job_ids: Sequence[int]) -> Changed:
    """Delete dead letters and their ledger for good."""
    rows, changed = _select(tx, job_ids, DISCARDABLE)
    if rows:
        ids = [row[0] for row in rows]
        tx.execute(DELETE_LEASES.format(ids=_marks(ids)), ids)
        tx.execute(DELETE_DEAD.format(ids=_marks(ids)), ids)
        for _, queue, *_rest in rows:
            tx.count(queue, State.DEAD, -1)
    return changed


def release_leases(tx: Transaction, job_ids: Sequence[int]) -> Changed:
    """Take running jobs from their owners and make them ready, uncharged.

    Their functions may still be running: the next attempt can overlap with them.
    """
    rows, changed = _select(tx, job_ids, RELEASABLE)
    if rows:
        ids = [row[0] for row in rows]
        ended = tx.fetch(RELEASE_LEASES.format(ids=_marks(ids)), [tx.now_db, *ids])
        steps = [Step(job, State.READY) for job in read_running(tx, [row[0] for row in ended])]
        for step in steps:
            step.attempt -= 1
            step.losses = step.job.losses
        move(tx, steps)
        tx.wake()
    return changed


def pause(tx: Transaction, queue: str) -> bool:
    """Stop claims from a queue; what runs goes on. Enqueues are accepted. False if it was paused."""
    queue = queue_name(queue)
    queue_limits(tx, queue)
    return _switch(tx, PAUSE, [tx.now_db, tx.now_db, queue])


def resume(tx: Transaction, queue: str) -> bool:
    """Allow claims from a queue again. False if they were allowed."""
    queue = queue_name(queue)
    queue_limits(tx, queue)
    return _switch(tx, RESUME, [tx.now_db, queue])


def hold_limits(tx: Transaction, queue: str) -> dict[str, int | None]:
    """Return the limits of a queue by name; nobody else changes them before this transaction ends."""
    queue = queue_name(queue)
    queue_limits(tx, queue)
    (row,) = tx.fetch(READ_LIMITS.format(lock=tx.dialect.lock_rows), [queue])
    return dict(zip(LIMITS, row, strict=True))


def set_limits(tx: Transaction, queue: str, **limits: int | None) -> None:
    """Replace limits of a queue, ``capacity=`` and ``max_running=``; None is unbounded.

    One that is not named stays as it is, and so do jobs already there.
    """
    unknown = sorted(set(limits) - set(LIMITS))
    if unknown or not limits:
        raise TypeError(f"name {' or '.join(LIMITS)}, not {', '.join(unknown) or 'nothing'}")
    for name, value in limits.items():
        if value is not None:
            bounds.whole(name, value, 0, MAX_LIMIT)
    queue = queue_name(queue)
    queue_limits(tx, queue)
    columns = ", ".join(f"{name} = %s" for name in limits)
    tx.execute(SET_LIMITS.format(limits=columns), [*limits.values(), tx.now_db, queue])
    tx.wake()


def rerank(queue: str, aging_seconds: float | None) -> int:
    """Change the aging of a queue and rewrite the ranks of its unfinished jobs; return how many.

    Works in transactions of its own, at most ``BATCH`` rows each. Jobs enqueued meanwhile already
    have the new rank. ``aging_seconds`` None is strict priority. Raises `InvalidJob`.
    """
    queue = queue_name(queue)
    if aging_seconds is not None:
        low, high = MIN_AGING_SECONDS, MAX_AGING_SECONDS
        aging_seconds = bounds.seconds("aging_seconds", aging_seconds, low, high)
    with transaction() as tx:
        queue_limits(tx, queue)
        tx.execute(SET_AGING, [aging_seconds, tx.now_db, queue])
    last, total = 0, 0
    while True:
        with transaction() as tx:
            rows = tx.fetch(NEXT_RANKS, [queue, last, BATCH])
            if not rows:
                return total
            aging = queue_aging(tx, queue)
            params: list[Any] = []
            for job_id, priority, available_at in rows:
                params += (job_id, rank(tx.dialect.from_db(available_at), priority, aging))
            values = tx.dialect.rows(len(rows), RANK_CASTS)
            tx.execute(SET_RANK.format(rows=values), tx.dialect.bind(params, RANK_CASTS))
        last, total = rows[-1][0], total + len(rows)


def recount(tx: Transaction, queue: str) -> dict[str, int]:
    """Set the counters of a queue to what its jobs are; return them by state.

    The cure for a wrong counter, which only a fault can cause. Holds the writer while it reads all
    jobs of the queue.
    """
    tx.flush()  # what earlier verbs of this transaction have moved is in the rows already
    if tx.dialect.freeze_counts:
        # Whoever has moved jobs has also written counters, and waits to; nobody is in between.
        tx.execute(tx.dialect.freeze_counts)
    counts = {state: int(n) for state, n in tx.fetch(RECOUNT, [queue])}
    tx.execute(FORGET_COUNTS, [queue])
    for state, n in counts.items():
        tx.count(queue, state, n)
    return counts


def _marks(ids: Sequence[int]) -> str:
    return ", ".join(["%s"] * len(ids))


def _select(
    tx: Transaction, job_ids: Sequence[int], states: frozenset[State]
) -> tuple[list[_Row], Changed]:
    """Split jobs into those in one of the states, those that are skipped, and unknown ids."""
    ids = bounds.ids(job_ids)
    if len(ids) > BATCH:
        raise ValueError(f"{len(ids)} jobs in one transaction; at most {BATCH}. Work in batches.")
    changed = Changed()
    rows: list[Any] = []
    if ids:
        for row in hold(tx, ids, leases=State.RUNNING in states):
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
    for job_id, queue, state, priority, _available_at in rows:
        aging = queue_aging(tx, queue)
        tx.execute(statement, [tx.now_db, rank(tx.now, priority, aging), job_id])
        tx.move(queue, state, State.READY)
    if rows:
        tx.wake()


def _switch(tx: Transaction, statement: str, params: Sequence[Any]) -> bool:
    changed = tx.execute(statement, params) == 1
    if changed:
        tx.wake()
    return changed
