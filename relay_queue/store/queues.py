"""Queues: their rows, made on first use, and the limits that every verb obeys."""

from __future__ import annotations

from dataclasses import dataclass

from relay_queue import conf
from relay_queue.conf import QueueOptions
from relay_queue.exceptions import InvalidJob, UnknownQueue, shown
from relay_queue.states import UNFINISHED
from relay_queue.store.transaction import Transaction

_UNFINISHED_SQL = ", ".join(f"'{state.value}'" for state in sorted(UNFINISHED))

FIND_LIMITS = f"""
    SELECT q.capacity, q.max_running, q.aging_seconds, q.paused_at IS NOT NULL,
           CASE WHEN q.capacity IS NULL THEN 0 ELSE
               (SELECT CAST(COALESCE(SUM(c.n), 0) AS bigint) FROM relay_queue_queuecount c
                WHERE c.queue = q.name AND c.state IN ({_UNFINISHED_SQL})) END
    FROM relay_queue_queue q WHERE q.name = %s
"""
"""Read the limits of one queue, and its unfinished jobs where a capacity makes them matter."""

HOLD_QUEUE = "SELECT name FROM relay_queue_queue WHERE name = %s{lock}"
"""Keep others from filling a queue with a capacity."""

CREATE_QUEUE = """
    INSERT INTO relay_queue_queue
        (name, capacity, max_running, aging_seconds, paused_at, created_at, updated_at)
    VALUES (%s, %s, %s, %s, NULL, %s, %s)
    ON CONFLICT (name) DO NOTHING
"""
"""Create the row of a queue unless somebody has."""


MOST_REMEMBERED = 1_000
"""Queues whose limits a process keeps in mind."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What an operator allows a queue. ``unfinished`` is counted only if ``capacity`` is set."""

    capacity: int | None
    max_running: int | None
    aging_seconds: float | None
    paused: bool
    unfinished: int


_unbounded: dict[str, QueueLimits] = {}


def queue_limits(tx: Transaction, name: str) -> QueueLimits:
    """Return the limits of a queue, creating its row on first use; see `queue_name`.

    If it has a capacity, nobody else fills it before this transaction ends. Of several queues, ask
    in the order of their names.
    """
    limits = _find(tx, name) or _create(tx, name)
    if limits.capacity is None or not tx.dialect.lock_rows:
        return limits
    # In two statements: the counters must be read after the wait for the lock.
    tx.fetch(HOLD_QUEUE.format(lock=tx.dialect.lock_rows), [name])
    return _find(tx, name) or limits


def queue_aging(tx: Transaction, name: str) -> float | None:
    """Return the aging of a queue, creating its row on first use. Waits for nobody."""
    return (_find(tx, name) or _create(tx, name)).aging_seconds


def guessed_limits(name: str) -> QueueLimits | None:
    """Return the limits of a queue that had no capacity when this process last read them.

    Another process may have changed them since, so a statement that relies on them asks again.
    """
    return _unbounded.get(name)


def ensure_queue(tx: Transaction, name: str) -> None:
    """Create the row of a queue if there is none; see `queue_name`."""
    queue_limits(tx, queue_name(name))


def queue_name(name: object) -> str:
    """Return a queue's name as a plain string.

    Raises `InvalidJob` if no queue can have it, and `UnknownQueue` if the settings list the queues
    and this is not one of them.
    """
    fault = conf.queue_name_fault(name)
    if fault is not None:
        raise InvalidJob(f"the queue name {shown(name)} {fault}")
    plain = str.__str__(name)
    known = conf.get().queues
    if known is not None and plain not in known:
        raise UnknownQueue(
            f"there is no queue {plain!r}; RELAY['QUEUES'] lists {', '.join(sorted(known))}. "
            "Add it there, or use one of these."
        )
    return plain


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
    _remember(name, limits)
    return limits


def _remember(name: str, limits: QueueLimits) -> None:
    if limits.capacity is not None:
        _unbounded.pop(name, None)
        return
    if len(_unbounded) >= MOST_REMEMBERED:
        _unbounded.clear()
    _unbounded[name] = limits


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
