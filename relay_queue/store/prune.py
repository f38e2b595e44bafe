"""Prune: delete old finished jobs, workers, bulk acts and statistics, a bounded bite at a time."""

from __future__ import annotations

from datetime import datetime

from relay_queue.states import TERMINAL, State
from relay_queue.store.dialects import marks
from relay_queue.store.transaction import Transaction
from relay_queue.store.transitions import moved

FIND_OLD = """
    SELECT id, queue FROM relay_queue_job
    WHERE state = %s AND finished_at < %s ORDER BY finished_at LIMIT %s{lock}
"""
"""Find the oldest finished jobs: a probe of the finished index."""

DELETE_LEASES = "DELETE FROM relay_queue_lease WHERE job_id IN ({ids})"
"""Delete the ledger first: a lease must not outlive its job."""

DELETE_JOBS = "DELETE FROM relay_queue_job WHERE id IN ({ids}) AND state = %s"
"""Delete the jobs, if they are still what was found. Not by time again: that would make the database
walk all old jobs instead of looking up these."""

OLD_WORKERS = """
    relay_queue_worker w WHERE w.stopped_at < %s
    AND NOT EXISTS (SELECT 1 FROM relay_queue_lease l
                    WHERE l.worker_id = w.id AND l.ended_at IS NULL)
"""

DELETE_WORKERS = f"""
    DELETE FROM relay_queue_worker WHERE id IN (SELECT w.id FROM {OLD_WORKERS} LIMIT %s)
"""
"""Delete workers that stopped long ago and hold nothing."""

DELETE_MINUTES = """
    DELETE FROM relay_queue_queueminute WHERE id IN (
        SELECT id FROM relay_queue_queueminute WHERE minute < %s ORDER BY minute LIMIT %s)
"""
"""Delete statistics of old minutes."""

OLD_BULK_ACTS = """
    relay_queue_bulkact b
    WHERE b.finished_at < %s OR (b.finished_at IS NULL AND b.created_at < %s
        AND b.job_id IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM relay_queue_job j WHERE j.id = b.job_id))
"""

DELETE_BULK_ACTS = f"""
    DELETE FROM relay_queue_bulkact WHERE id IN (
        SELECT b.id FROM {OLD_BULK_ACTS} ORDER BY b.id LIMIT %s)
"""
"""Delete bulk acts that ended long ago, or that cannot go on because their job is gone."""


def prune(tx: Transaction, state: State, finished_before: datetime, limit: int = 1000) -> int:
    """Delete up to ``limit`` jobs of a terminal state that finished before a time, with leases.

    Returns how many. Raises ``ValueError`` for a state that is not terminal.
    """
    if state not in TERMINAL:
        raise ValueError(f"jobs that are {state!r} are not finished and cannot be pruned")
    before = tx.dialect.to_db(finished_before)
    statement = FIND_OLD.format(lock=tx.dialect.skip_locked)
    rows = tx.fetch(statement, [State(state).value, before, limit])
    if not rows:
        return 0
    ids = [row[0] for row in rows]
    listed = marks(len(ids))
    tx.execute(DELETE_LEASES.format(ids=listed), ids)
    tx.execute(DELETE_JOBS.format(ids=listed), [*ids, State(state).value])
    moved(tx, rows, state, None)
    return len(ids)


def prune_workers(tx: Transaction, before: datetime, limit: int = 1000) -> int:
    """Delete up to ``limit`` workers that stopped before a time; return how many."""
    return tx.execute(DELETE_WORKERS, [tx.dialect.to_db(before), limit])


def prune_minutes(tx: Transaction, before: datetime, limit: int = 1000) -> int:
    """Delete up to ``limit`` rows of statistics of minutes before a time; return how many."""
    return tx.execute(DELETE_MINUTES, [tx.dialect.to_db(before), limit])


def prune_bulk_acts(tx: Transaction, before: datetime, limit: int = 1000) -> int:
    """Delete up to ``limit`` bulk acts that ended before a time; return how many.

    One that did not end goes by the time at which it was asked for, once its job is gone.
    """
    moment = tx.dialect.to_db(before)
    return tx.execute(DELETE_BULK_ACTS, [moment, moment, limit])
