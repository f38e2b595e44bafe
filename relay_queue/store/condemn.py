"""Condemn: take a job whose row cannot be read out of circulation, without reading it.

A flipped bit in one row must cost one job, not the worker that meets it, nor the jobs behind it.
"""

from __future__ import annotations

from typing import Final

from django.db import DatabaseError

from relay_queue.states import State
from relay_queue.store.transaction import Transaction

UNREADABLE: Final = (DatabaseError, ValueError, TypeError, ArithmeticError)
"""What reading an altered row may raise: undecodable text, a date that is none, a number that is
text, a constraint that the row breaks as soon as it is touched."""

FIND = """
    SELECT queue, state FROM relay_queue_job WHERE id = %s AND state IN ('ready', 'running')
"""
"""Read where a job stands, and nothing else of it: only these two states lead to dead."""

BURY = """
    UPDATE relay_queue_job SET state = 'dead', finished_at = %s, last_error = %s
    WHERE id = %s AND state = %s
"""
"""Send a job to the dead letters whatever else its row says."""

END_LEASE = """
    UPDATE relay_queue_lease SET ended_at = %s, outcome = 'lost'
    WHERE job_id = %s AND ended_at IS NULL
"""
"""End its lease: nobody can know what came of it."""

JOB_OF_LEASE = "SELECT job_id FROM relay_queue_lease WHERE id = %s AND token = %s"
"""Find the job of a lease."""


def queue_of(tx: Transaction, job_id: int) -> str | None:
    """Return the queue of a ready or running job; None if there is no such job any more."""
    rows = tx.fetch(FIND, [job_id])
    return str(rows[0][0]) if rows else None


def job_of_lease(tx: Transaction, lease_id: int, token: str) -> int | None:
    """Return the id of a lease's job, or None if no lease has this id and token."""
    rows = tx.fetch(JOB_OF_LEASE, [lease_id, token])
    return int(rows[0][0]) if rows else None


def condemn(tx: Transaction, job_id: int, error: Exception) -> bool:
    """Make a ready or running job a dead letter because its row cannot be read; say whether it was.

    Whoever asks must have proven that the row is at fault, as `relay_queue.store.trial` does.
    """
    rows = tx.fetch(FIND, [job_id])
    for queue, state in rows:
        message = f"Unreadable: the row of this job was altered ({type(error).__name__})"
        tx.execute(END_LEASE, [tx.now_db, job_id])
        tx.execute(BURY, [tx.now_db, message, job_id, state])
        tx.move(queue, state, State.DEAD)
    return bool(rows)
