"""What a worker's loop asks: short reads that need no write lock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay_queue import clock, validation
from relay_queue.query import reads
from relay_queue.states import NOT_DUE, UNFINISHED, State, sql_list
from relay_queue.store.claim import HAS_READY
from relay_queue.store.dialects import marks
from relay_queue.store.workers import TRY_LOCKS

READY_QUEUES = f"""
    SELECT q.name FROM relay_queue_queue q WHERE q.paused_at IS NULL
    AND {HAS_READY.format(only="")}
"""
"""Which unpaused queues have ready jobs: one probe of the ready index each."""

QUEUE_NAMES = "SELECT name, max_running IS NOT NULL FROM relay_queue_queue ORDER BY name"
"""All queues, and whether their running jobs are limited."""

NEXT_DUE = f"""
    SELECT MIN(at), {{clock}} FROM (
        SELECT (SELECT available_at FROM relay_queue_job WHERE state IN ({sql_list(NOT_DUE)})
                ORDER BY available_at LIMIT 1) AS at
        UNION ALL
        SELECT (SELECT next_at FROM relay_queue_schedule WHERE next_at IS NOT NULL
                ORDER BY next_at LIMIT 1)) AS due
    HAVING MIN(at) IS NOT NULL
"""
"""When the next waiting job is due, or the next slot of a schedule comes."""

NEXT_EXPIRY = """
    SELECT expires_at, {clock} FROM relay_queue_lease
    WHERE ended_at IS NULL ORDER BY expires_at LIMIT 1
"""
"""When the next open lease runs out."""

OPEN_LEASES = "SELECT id FROM relay_queue_lease WHERE id IN ({ids}) AND ended_at IS NULL"
"""Which of these leases are still open."""

LEASES_OF = "SELECT id, token FROM relay_queue_lease WHERE worker_id = %s AND ended_at IS NULL"
"""The open leases of one worker."""

LIVE_WORKERS = """
    SELECT id, incarnation, lock_device, lock_inode, session_lock FROM relay_queue_worker
    WHERE stopped_at IS NULL AND (lock_device IS NOT NULL OR session_lock) AND id > %s AND id < %s
    ORDER BY id LIMIT %s
"""
"""Some workers whose end can be proven and was not seen: a walk along the primary key."""

AT_ONCE = 8
"""How many workers `live_workers` reads first, mostly more than are asked for. Then it reads twice
as many each time."""

ORDER_OF = "SELECT ordered FROM relay_queue_worker WHERE id = %s"
"""The order that an operator gave a worker."""

BUSY_QUEUES = f"""
    SELECT q.name FROM relay_queue_queue q
    WHERE q.paused_at IS NULL AND COALESCE(q.max_running, 1) > 0 AND (SELECT SUM(c.n) FROM relay_queue_queuecount c WHERE c.queue = q.name
         AND c.state IN ({sql_list(UNFINISHED - {State.SCHEDULED})})) > 0
"""
"""Which queues that may run have jobs that are ready, running or between two attempts."""

BUSY_WITH = f"""
    SELECT q.name FROM relay_queue_queue q
    WHERE q.paused_at IS NULL AND COALESCE(q.max_running, 1) > 0 AND (
        {HAS_READY.format(only=" AND j.backend IN ({aliases})")}
        OR (SELECT j.id FROM relay_queue_job j WHERE j.queue = q.name
            AND j.state IN ({sql_list(NOT_DUE)}) AND j.state = 'retrying'
            AND j.backend IN ({{aliases}}) ORDER BY j.available_at LIMIT 1) IS NOT NULL
        OR EXISTS (SELECT 1 FROM relay_queue_lease l JOIN relay_queue_job j ON j.id = l.job_id
                   WHERE l.ended_at IS NULL AND j.queue = q.name AND j.backend IN ({{aliases}})))
"""
"""The same for some backends only. Both states are named so that the due index serves."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a loop learns from one look at the queues: see `read_queues`."""

    queues: list[str]
    limited: set[str]
    ready: set[str]
    next_due_at: datetime | None
    next_expiry_at: datetime | None
    now: datetime
    """What time it was by the clock that these two follow, which may not be this machine's."""


@dataclass(frozen=True, slots=True)
class OtherWorker:
    """A worker that may be dead: its row's id, and what its death could be proven by."""

    worker_id: int
    incarnation: str
    lock_device: int | None
    lock_inode: int | None
    session_lock: bool


def now() -> datetime:
    """Return the time by the clock that leases follow: on a server, the server's."""
    return reads.dialect().now(reads.connection())


def read_queues() -> QueueState:
    """Read all queues, which have ready jobs, and when the next job is due and lease runs out.

    Raises the database's error, also if another file is at its path meanwhile.
    """
    reads.dialect().check_file(reads.connection())
    names = reads.rows(QUEUE_NAMES)
    next_due_at, next_expiry_at, now = next_times()
    return QueueState(
        queues=[name for name, _ in names],
        limited={name for name, is_limited in names if is_limited},
        ready=ready_queues(),
        next_due_at=next_due_at,
        next_expiry_at=next_expiry_at,
        now=now,
    )


def next_times() -> tuple[datetime | None, datetime | None, datetime]:
    """Return when the next waiting job is due, when the next open lease runs out, and the time.

    All three by the clock of the database: this machine's may be minutes behind it.
    """
    dialect = reads.dialect()
    due, expiry = (reads.rows(sql.format(clock=dialect.clock)) for sql in (NEXT_DUE, NEXT_EXPIRY))
    readings = [row[1] for row in (*due, *expiry) if row[1] is not None]
    now = clock.of_database(dialect.from_db(readings[-1])) if readings else clock.now()
    return _moment(due, now), _moment(expiry, now), now


def ready_queues() -> set[str]:
    """Return the queues that have ready jobs and are not paused."""
    return {row[0] for row in reads.rows(READY_QUEUES)}


def busy_queues(backends: Sequence[str] | None = None) -> set[str]:
    """Return the unpaused queues with jobs that are ready, running or between two attempts.

    ``backends`` restricts to jobs enqueued through these aliases. The counters do not know them, so
    jobs are then read until one is found.
    """
    if backends is None:
        return {row[0] for row in reads.rows(BUSY_QUEUES)}
    aliases = marks(len(backends))
    return {row[0] for row in reads.rows(BUSY_WITH.format(aliases=aliases), *[*backends] * 3)}


def open_leases(lease_ids: Collection[int]) -> set[int]:
    """Return which of these leases have not ended."""
    if not lease_ids:
        return set()
    statement = OPEN_LEASES.format(ids=marks(len(lease_ids)))
    return {row[0] for row in reads.rows(statement, *lease_ids)}


def leases_of(worker_id: int) -> dict[int, str]:
    """Return the open leases of a worker, with their tokens."""
    return dict(reads.rows(LEASES_OF, worker_id))


def unlocked(keys: Sequence[int]) -> set[int]:
    """Return which of these session locks are free; see `relay_queue.store.workers`."""
    return {row[0] for row in reads.rows(TRY_LOCKS, list(keys))} if keys else set()


def live_workers(but: int) -> Iterator[OtherWorker]:
    """Yield the workers whose end can be proven and was not seen, but for the one with id ``but``.

    They come in the order of a ring: those behind it first, then those before it. Only as many are
    read as are asked for, and some.
    """
    most = AT_ONCE
    for first, end in ((but, validation.MAX_ID), (0, but)):
        after, full = first, True
        while full:
            rows = reads.rows(LIVE_WORKERS, after, end, most)
            yield from (OtherWorker(*row) for row in rows)
            full = len(rows) == most
            after, most = rows[-1][0] if rows else after, 2 * most


def order_of(worker_id: int) -> str | None:
    """Return the order that stands on a worker's row, empty without one; None if it has no row."""
    rows = reads.rows(ORDER_OF, worker_id)
    return str(rows[0][0]) if rows else None


def _moment(rows: list[tuple[Any, ...]], now: datetime) -> datetime | None:
    if not rows:
        return None
    try:
        return reads.dialect().from_db(rows[0][0])
    except (ValueError, TypeError):
        return now  # an altered row: the caller that acts on it finds out
