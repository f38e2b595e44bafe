"""The registry of workers, their locks on a server, and the statistics that each writes for itself.

On PostgreSQL the server drops a worker's lock when its session ends. The key is made from the
worker's random incarnation, so a lock that is free says that this very worker has no session. It may
still live: its connection was cut, or the server restarted and it has not been back. Then its leases
end too early, and their tokens fence it like any other late owner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from relay_queue import validation
from relay_queue.states import WorkerOrder
from relay_queue.store.dialects import marks
from relay_queue.store.transaction import Transaction
from relay_queue.validation import is_incarnation

RESTART_GRACE_SECONDS = 10
"""After a start of the server all locks are free, and living workers need time to take theirs
again."""

TRY_LOCKS = f"""
    SELECT key FROM unnest(%s::bigint[]) AS wanted (key)
    WHERE CASE WHEN now() - pg_postmaster_start_time() > interval '{RESTART_GRACE_SECONDS} seconds'
               THEN pg_try_advisory_xact_lock(key) ELSE false END
"""
"""Take those of some workers' locks that are free, until the end of the transaction."""

REGISTER = """
    INSERT INTO relay_queue_worker
        ({id}incarnation, name, host, boot_id, pid, lock_device, lock_inode, session_lock, version,
         queues, concurrency, started_at, heartbeat_at, stop_reason, ordered, claimed, succeeded, failed,
         refused)
    VALUES ({marks}, '', '', 0, 0, 0, 0)
    RETURNING id
"""
"""Add a worker."""

REGISTERED_VALUES = 13
"""The values that `REGISTER` is given, without an id."""

HEARTBEAT = """
    UPDATE relay_queue_worker
    SET heartbeat_at = %s, claimed = %s, succeeded = %s, failed = %s, refused = %s,
        stopped_at = NULL, stop_reason = %s
    WHERE id = %s
"""
"""Say that a worker is alive, even if it was marked as ended, and write its totals. While it lives,
``stop_reason`` says what hinders its work; mostly it is empty."""

STOP = """
    UPDATE relay_queue_worker SET stopped_at = %s, stop_reason = %s
    WHERE id IN ({ids}) AND stopped_at IS NULL
"""
"""Say that workers have ended, and why."""

ORDER = """
    UPDATE relay_queue_worker SET ordered = %s, ordered_at = %s
    WHERE id IN ({ids}) AND stopped_at IS NULL AND ordered <> 'stop'
    RETURNING id
"""
"""Give workers an order. A worker that was ordered to stop takes no other order."""

WRITE_OFF = """
    UPDATE relay_queue_worker SET stopped_at = %s, stop_reason = 'vanished: no heartbeat'
    WHERE id IN (
        SELECT w.id FROM relay_queue_worker w
        WHERE w.stopped_at IS NULL AND w.heartbeat_at < %s
        AND NOT EXISTS (SELECT 1 FROM relay_queue_lease l
                        WHERE l.worker_id = w.id AND l.ended_at IS NULL)
        LIMIT %s)
"""
"""Mark workers as ended that have been silent for long and hold nothing."""

ROLL_UP = """
    INSERT INTO relay_queue_queueminute
        (queue, worker_id, minute, claimed, succeeded, failed, retried, died, expired, refused,
         wait_histogram, run_histogram)
    {rows}
    ON CONFLICT (minute, queue, worker_id) DO UPDATE SET
        claimed = excluded.claimed, succeeded = excluded.succeeded, failed = excluded.failed,
        retried = excluded.retried, died = excluded.died, expired = excluded.expired,
        refused = excluded.refused, wait_histogram = excluded.wait_histogram,
        run_histogram = excluded.run_histogram
"""
"""Write a worker's totals of some minutes; a worker writes only rows of its own."""

REASON_CHARACTERS = 200
"""What the column of reasons holds."""

ROLL_UP_ROWS = 500
"""Rows in one statement: below the parameter limit of every database."""

MINUTE_CASTS = ("text", "bigint", "timestamptz", *["int"] * 7, "text", "text")


def lock_key(incarnation: object) -> int | None:
    """Return the key of a worker's lock: the first half of its incarnation, as a signed number.

    None for what is no incarnation: an altered row proves nothing of its worker.
    """
    if not is_incarnation(incarnation):
        return None
    return int.from_bytes(bytes.fromhex(incarnation[:16]), signed=True)


def take_locks(tx: Transaction, keys: Sequence[int]) -> set[int]:
    """Take the locks among these that are free, until the commit; return their keys.

    Until then no other worker can judge these workers, and they cannot come back.
    """
    return {row[0] for row in tx.fetch(TRY_LOCKS, [list(keys)])} if keys else set()


@dataclass(frozen=True, slots=True)
class NewWorker:
    """What a worker says of itself when it starts.

    ``lock_device`` and ``lock_inode`` name the file that it has locked; ``session_lock`` says that
    a session of its own holds the lock of `relay_queue.store.workers`. With neither, its death
    cannot be proven. ``version`` is that of the code it runs. Without ``queues`` it serves all but
    ``exclude_queues``.
    """

    incarnation: str
    name: str
    host: str
    boot_id: str
    pid: int
    lock_device: int | None
    lock_inode: int | None
    queues: Sequence[str]
    concurrency: int
    session_lock: bool = False
    version: str = ""
    exclude_queues: Sequence[str] = ()


@dataclass(slots=True)
class Totals:
    """What a worker, or one minute of it, has done. Histograms count per bucket of `bucket`."""

    claimed: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    died: int = 0
    expired: int = 0
    refused: int = 0
    wait: dict[int, int] = field(default_factory=dict)
    run: dict[int, int] = field(default_factory=dict)


def bucket(seconds: float) -> int:
    """Return the histogram bucket of a duration: n holds [2^(n-1), 2^n) microseconds."""
    return max(0, int(seconds * 1_000_000)).bit_length()


def register_worker(tx: Transaction, worker: NewWorker) -> int:
    """Add a worker and return its id. Its liveness lock must be held before."""
    statement = REGISTER.format(id="", marks=marks(REGISTERED_VALUES))
    ((worker_id,),) = tx.fetch(statement, _values(tx, worker))
    return int(worker_id)


def _values(tx: Transaction, worker: NewWorker) -> list[Any]:
    return [
        worker.incarnation,
        worker.name,
        worker.host,
        worker.boot_id,
        worker.pid,
        worker.lock_device,
        worker.lock_inode,
        worker.session_lock,
        worker.version,
        _served(worker),
        worker.concurrency,
        tx.now_db,
        tx.now_db,
    ]


def _served(worker: NewWorker) -> str:
    """Return the names of the queues, separated by commas; behind a first comma, of those left out."""
    names = worker.queues or ("", *worker.exclude_queues)
    return ",".join(names)


def register_again(tx: Transaction, worker_id: int, worker: NewWorker, order: str = "") -> None:
    """Add a living worker whose row was deleted, under the id that its leases name.

    ``order`` is the one that it obeys, a value of `WorkerOrder`.
    """
    statement = REGISTER.format(id="id, ", marks=marks(1 + REGISTERED_VALUES))
    tx.execute(statement, [worker_id, *_values(tx, worker)])
    if order in WorkerOrder.values:
        order_workers(tx, [worker_id], WorkerOrder(order))


def heartbeat(tx: Transaction, worker_id: int, totals: Totals, hindrance: str = "") -> bool:
    """Say that a worker is alive, and write its running totals; False if its row was deleted.

    ``hindrance`` is what keeps it from its work, in one line of which 200 characters are kept.
    """
    done = [totals.claimed, totals.succeeded, totals.failed, totals.refused]
    values = [tx.now_db, *done, hindrance[:REASON_CHARACTERS], worker_id]
    return tx.execute(HEARTBEAT, values) == 1


def stop_workers(tx: Transaction, worker_ids: Sequence[int], reason: str) -> int:
    """Mark workers as ended, with the reason; return how many were not yet."""
    worker_ids = validation.valid_ids(worker_ids)
    if not worker_ids:
        return 0
    statement = STOP.format(ids=marks(len(worker_ids)))
    return tx.execute(statement, [tx.now_db, reason[:REASON_CHARACTERS], *worker_ids])


def order_workers(
    tx: Transaction, worker_ids: Sequence[int], order: WorkerOrder | None
) -> list[int]:
    """Order workers to be quiet or to stop, or with None to serve again; return the ids of those
    that took the order.

    They read it within about a second. A worker that has ended, or was ordered to stop, is passed
    over.
    """
    worker_ids = validation.valid_ids(worker_ids)
    if not worker_ids:
        return []
    statement = ORDER.format(ids=marks(len(worker_ids)))
    ordered = ("", None) if order is None else (str(order), tx.now_db)
    return [row[0] for row in tx.fetch(statement, [*ordered, *worker_ids])]


def write_off_workers(tx: Transaction, silent_since: datetime, limit: int = 1000) -> int:
    """Mark up to ``limit`` workers as ended that were last heard of before a time.

    For workers of other machines or containers, whose locks cannot be probed here. One that comes
    back after all says so with its next heartbeat.
    """
    return tx.execute(WRITE_OFF, [tx.now_db, tx.dialect.to_db(silent_since), limit])


def roll_up(
    tx: Transaction, worker_id: int, minutes: Mapping[tuple[str, datetime], Totals]
) -> None:
    """Write a worker's totals of some (queue, minute) pairs, replacing what it wrote before."""
    entries = list(minutes.items())
    for start in range(0, len(entries), ROLL_UP_ROWS):
        _roll_up(tx, worker_id, entries[start : start + ROLL_UP_ROWS])


def _roll_up(
    tx: Transaction, worker_id: int, entries: Sequence[tuple[tuple[str, datetime], Totals]]
) -> None:
    params: list[Any] = []
    for (queue, minute), t in entries:
        params += (queue, worker_id, tx.dialect.to_db(minute), t.claimed, t.succeeded, t.failed)
        params += (t.retried, t.died, t.expired, t.refused, json.dumps(t.wait), json.dumps(t.run))
    rows = tx.dialect.rows(len(entries), MINUTE_CASTS)
    tx.execute(ROLL_UP.format(rows=rows), tx.dialect.bind(params, MINUTE_CASTS))
