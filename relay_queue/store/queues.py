"""Queues: their rows, made on first use, the limits that every verb obeys, and what an operator may do to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from relay_queue import conf, validation
from relay_queue.conf import QueueOptions
from relay_queue.exceptions import InvalidJob, QueueInUse, UnknownQueue, shown
from relay_queue.ranking import MAX_AGING_SECONDS, MIN_AGING_SECONDS, rank
from relay_queue.states import TERMINAL, UNFINISHED, sql_list
from relay_queue.store.transaction import Transaction, transaction

FIND_LIMITS = f"""
    SELECT q.capacity, q.max_running, q.aging_seconds, q.paused_at IS NOT NULL,
           CASE WHEN q.capacity IS NULL THEN 0 ELSE
               (SELECT CAST(COALESCE(SUM(c.n), 0) AS bigint) FROM relay_queue_queuecount c
                WHERE c.queue = q.name AND c.state IN ({sql_list(UNFINISHED)})) END
    FROM relay_queue_queue q WHERE q.name = %s
"""
"""Read the limits of one queue, and its unfinished jobs where a capacity makes them matter."""

HOLD_QUEUE = "SELECT name FROM relay_queue_queue WHERE name = %s{lock}"
"""Keep other transactions from filling a queue with a capacity."""

CREATE_QUEUE = """
    INSERT INTO relay_queue_queue
        (name, capacity, max_running, aging_seconds, paused_at, created_at, updated_at)
    VALUES (%s, %s, %s, %s, NULL, %s, %s)
    ON CONFLICT (name) DO NOTHING
"""
"""Create the row of a queue unless it is there."""

MOST_REMEMBERED = 1_000
"""Queues whose limits a process keeps in mind."""

_unbounded: dict[tuple[str, str], QueueLimits] = {}
"""The limits of queues without a capacity, by the alias of the database and the queue's name."""

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

NEXT_RANKS = f"""
    SELECT id, priority, available_at FROM relay_queue_job
    WHERE queue = %s AND id > %s AND state NOT IN ({sql_list(TERMINAL)})
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
"""Drop the counters of a queue; the same transaction writes new ones."""

HAS_JOBS = "SELECT 1 FROM relay_queue_job WHERE queue = %s LIMIT 1"
"""Look whether a queue has any job."""

READ_COUNTS = """
    SELECT state, SUM(n) FROM relay_queue_queuecount WHERE queue = %s
    GROUP BY state HAVING SUM(n) > 0 ORDER BY state
"""
"""Read the counters of a queue."""

DELETE_QUEUE = "DELETE FROM relay_queue_queue WHERE name = %s"
"""Delete the row of a queue that has no job."""

FREEZE_WAIT: Final = "500ms"
"""How long the deletion of a queue waits for others. All who use any queue wait behind it."""

RERANK_ROWS: Final = 1000
"""Rows whose ranks one transaction rewrites at the most."""

LIMITS: Final = ("capacity", "max_running")
"""The limits of a queue, which are columns of its row."""

MAX_LIMIT: Final = 2**31 - 1
"""The largest capacity or number of running jobs that the columns hold."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What an operator allows a queue. ``unfinished`` is counted only if ``capacity`` is set."""

    capacity: int | None
    max_running: int | None
    aging_seconds: float | None
    paused: bool
    unfinished: int


def queue_limits(tx: Transaction, name: str) -> QueueLimits:
    """Return the limits of a queue, creating its row on first use; see `queue_name`.

    If it has a capacity, no other transaction fills it before this one ends. Of several queues, ask
    in the order of their names.
    """
    limits = _find(tx, name) or _create(tx, name)
    if limits.capacity is None or not tx.dialect.lock_rows:
        return limits
    # In two statements: the counters must be read after the wait for the lock.
    tx.fetch(HOLD_QUEUE.format(lock=tx.dialect.lock_rows), [name])
    return _find(tx, name) or limits


def queue_aging(tx: Transaction, name: str) -> float | None:
    """Return the aging of a queue, creating its row on first use. Waits for no lock."""
    return (_find(tx, name) or _create(tx, name)).aging_seconds


def guessed_limits(tx: Transaction, name: str) -> QueueLimits | None:
    """Return the limits of a queue that had no capacity when this process last read them.

    Another process may have changed them since, so a statement that relies on them asks again.
    """
    return _unbounded.get((tx.connection.alias, name))


def ensure_queue(tx: Transaction, name: str) -> None:
    """Create the row of a queue if there is none; see `queue_name`."""
    queue_limits(tx, queue_name(name))


def queue_name(name: object) -> str:
    """Return a queue's name as a plain string.

    Raises `InvalidJob` if no queue can have it, and `UnknownQueue` if the settings list the queues
    and this is not one of them.
    """
    plain = _possible_name(name)
    known = conf.get().queues
    if known is not None and plain not in known:
        raise UnknownQueue(
            f"there is no queue {plain!r}; RELAY['QUEUES'] lists {', '.join(sorted(known))}. "
            "Add it there, or use one of these."
        )
    return plain


def _possible_name(name: object) -> str:
    fault = conf.queue_name_fault(name)
    if fault is not None:
        raise InvalidJob(f"the queue name {shown(name)} {fault}")
    return str.__str__(name)


def _find(tx: Transaction, name: str) -> QueueLimits | None:
    rows = tx.fetch(FIND_LIMITS, [name])
    if not rows:
        return None
    capacity, max_running, aging_seconds, paused, unfinished = rows[0]
    # What this very transaction has moved is not in the table yet.
    pending = sum(tx.pending(name, state) for state in UNFINISHED)
    if not isinstance(aging_seconds, int | float | None):
        aging_seconds = QueueOptions().aging_seconds  # an altered row must not stop the queue
    limits = QueueLimits(capacity, max_running, aging_seconds, bool(paused), unfinished + pending)
    _remember((tx.connection.alias, name), limits)
    return limits


def _remember(queue: tuple[str, str], limits: QueueLimits) -> None:
    if limits.capacity is not None:
        _unbounded.pop(queue, None)
        return
    if len(_unbounded) >= MOST_REMEMBERED:
        _unbounded.clear()
    _unbounded[queue] = limits


def _create(tx: Transaction, name: str) -> QueueLimits:
    name = queue_name(name)
    known = conf.get().queues
    options = QueueOptions() if known is None else known[name]
    tx.execute(
        CREATE_QUEUE,
        [name, options.capacity, options.max_running, options.aging_seconds, tx.now_db, tx.now_db],
    )
    limits = _find(tx, name)
    assert limits is not None, "the row was inserted in this very transaction"
    return limits


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


def delete_queue(tx: Transaction, queue: str) -> bool:
    """Delete a queue that has no job, with its limits and its pause. False if there is none.

    The next enqueue makes it again, as the settings say. Statistics of past minutes stay until they
    are pruned. Raises `QueueInUse` if it has jobs, finished ones included. On a server it waits for
    the transactions that use any queue, since one of them may be about to add a job, and raises
    ``OperationalError`` after ``FREEZE_WAIT``. From then on to the commit nobody else can use a queue:
    do not call it inside of a long ``atomic()``.
    """
    queue = _possible_name(queue)  # one that the settings do not list any more is to go, too
    tx.flush()  # else counters that this transaction owes would come back behind the deletion
    if tx.dialect.freeze_queues:
        with tx.waiting_at_most(FREEZE_WAIT):
            tx.execute(tx.dialect.freeze_queues)
    # In a statement of its own: what was committed during the wait for the lock must be seen.
    if tx.fetch(HAS_JOBS, [queue]):
        raise QueueInUse(queue, {state: int(n) for state, n in tx.fetch(READ_COUNTS, [queue])})
    _unbounded.pop((tx.connection.alias, queue), None)
    tx.execute(FORGET_COUNTS, [queue])
    return tx.execute(DELETE_QUEUE, [queue]) == 1


def hold_limits(tx: Transaction, queue: str) -> dict[str, int | None]:
    """Return the limits of a queue by name, and lock them until this transaction ends."""
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
            validation.require_int(name, value, 0, MAX_LIMIT)
    queue = queue_name(queue)
    queue_limits(tx, queue)
    columns = ", ".join(f"{name} = %s" for name in limits)
    tx.execute(SET_LIMITS.format(limits=columns), [*limits.values(), tx.now_db, queue])
    tx.wake()


def rerank(queue: str, aging_seconds: float | None) -> int:
    """Change the aging of a queue and rewrite the ranks of its unfinished jobs; return how many.

    Works in transactions of its own, at most ``RERANK_ROWS`` rows each. Jobs enqueued meanwhile already
    have the new rank. ``aging_seconds`` None is strict priority. Raises `InvalidJob`.
    """
    queue = queue_name(queue)
    if aging_seconds is not None:
        low, high = MIN_AGING_SECONDS, MAX_AGING_SECONDS
        aging_seconds = validation.require_seconds("aging_seconds", aging_seconds, low, high)
    with transaction() as tx:
        queue_limits(tx, queue)
        tx.execute(SET_AGING, [aging_seconds, tx.now_db, queue])
    last, total = 0, 0
    while True:
        with transaction() as tx:
            rows = tx.fetch(NEXT_RANKS, [queue, last, RERANK_ROWS])
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
        # A transaction that has moved jobs has also written counters, or waits to do so. So none is
        # between the two.
        tx.execute(tx.dialect.freeze_counts)
    counts = {state: int(n) for state, n in tx.fetch(RECOUNT, [queue])}
    tx.execute(FORGET_COUNTS, [queue])
    for state, n in counts.items():
        tx.count(queue, state, n)
    return counts


def _switch(tx: Transaction, statement: str, params: Sequence[Any]) -> bool:
    changed = tx.execute(statement, params) == 1
    if changed:
        tx.wake()
    return changed
