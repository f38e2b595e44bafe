"""Bulk acts: one operator's act on many jobs, in batches that keep their position.

A batch and its progress commit together. So an act that is interrupted, or run twice by mistake,
loses no job and counts none twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from relay_queue import validation
from relay_queue.store.transaction import Transaction

START = """
    INSERT INTO relay_queue_bulkact
        (nonce, act, priority, listing, filters, time_zone, language, upper_id, matched, position,
         changed, skipped, user_id, username, site, created_at, stop_reason)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, 0, 0, 0, %s, %s, %s, %s, '')
    ON CONFLICT (nonce) DO NOTHING
    RETURNING id
"""
"""Note what is to be done, unless it was noted for the same nonce already."""

GIVE_TO_JOB = "UPDATE relay_queue_bulkact SET job_id = %s WHERE id = %s"
"""Note the job that does it."""

TAKE_TURN = """
    UPDATE relay_queue_bulkact SET position = %s
    WHERE id = %s AND position = %s AND finished_at IS NULL AND cancelled_at IS NULL
"""
"""Move on by one batch, unless another run has, or the act is over."""

COUNT = (
    "UPDATE relay_queue_bulkact SET changed = changed + %s, skipped = skipped + %s WHERE id = %s"
)
"""Add what a batch did."""

CANCEL = """
    UPDATE relay_queue_bulkact SET cancelled_at = %s, finished_at = %s
    WHERE id = %s AND finished_at IS NULL
"""
"""End an act between two batches."""

FINISH = """
    UPDATE relay_queue_bulkact SET finished_at = %s, stop_reason = %s
    WHERE id = %s AND finished_at IS NULL
"""
"""End an act that is through, or cannot go on."""


@dataclass(frozen=True, slots=True)
class NewBulkAct:
    """What to do to which jobs, and who wants it. A nonce is good for one act.

    ``site`` is the name of the admin site whose list it is: that one says which jobs are seen.
    """

    nonce: str
    act: str
    priority: int | None
    listing: str
    filters: str
    time_zone: str
    language: str
    upper_id: int
    matched: int | None
    user_id: str
    username: str
    site: str


def start_bulk(tx: Transaction, new: NewBulkAct) -> int | None:
    """Note a bulk act and return its id; None if there is one of this nonce."""
    values = [
        new.nonce,
        new.act,
        new.priority,
        new.listing,
        new.filters,
        new.time_zone,
        new.language,
    ]
    values += [new.upper_id, new.matched, new.user_id, new.username, new.site]
    values.append(tx.now_db)
    rows = tx.fetch(START, values)
    return int(rows[0][0]) if rows else None


def give_bulk_to_job(tx: Transaction, bulk_id: int, job_id: int) -> None:
    """Note which job does a bulk act."""
    tx.execute(GIVE_TO_JOB, [job_id, bulk_id])


def take_bulk_turn(tx: Transaction, bulk_id: int, position: int, upto: int) -> bool:
    """Move a bulk act on from ``position``; False if it is over or another run has moved it.

    Call it before the batch, in the same transaction: the row then keeps others from the batch.
    """
    return validation.is_id(bulk_id) and tx.execute(TAKE_TURN, [upto, bulk_id, position]) == 1


def count_bulk(tx: Transaction, bulk_id: int, *, changed: int, skipped: int) -> None:
    """Add what a batch did to the numbers of a bulk act."""
    tx.execute(COUNT, [changed, skipped, bulk_id])


def cancel_bulk(tx: Transaction, bulk_id: int) -> bool:
    """End a bulk act after the batch that is being done; False if it was over already."""
    return validation.is_id(bulk_id) and tx.execute(CANCEL, [tx.now_db, tx.now_db, bulk_id]) == 1


def finish_bulk(tx: Transaction, bulk_id: int, stop_reason: str = "") -> bool:
    """End a bulk act, with the reason if jobs are left; False if it was over already."""
    values = [tx.now_db, stop_reason[:500], bulk_id]
    return validation.is_id(bulk_id) and tx.execute(FINISH, values) == 1
