"""Hold: keep others from jobs that an operator's verb is about to change, or from all leases.

Where many write at once, whoever needs a job's lease and the job takes the lease first: so does a
settlement, and two that take them in the same order never wait crosswise.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from django.db import transaction

from relay_queue.store.transaction import Transaction

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

STAND_ALONE = "LOCK TABLE relay_queue_lease IN EXCLUSIVE MODE"
"""Wait for all who write or hold leases, and keep them out. Reading is not hindered."""


def hold(tx: Transaction, job_ids: Sequence[int], *, leases: bool) -> list[tuple[Any, ...]]:
    """Return the rows of ``READ_JOBS``; they stay as they are until the commit.

    With ``leases``, so do the open leases of these jobs.
    """
    marks, lock = ", ".join(["%s"] * len(job_ids)), tx.dialect.lock_rows
    read_jobs = READ_JOBS.format(ids=marks, lock=lock)
    if not lock or not leases:
        return tx.fetch(read_jobs, job_ids)
    while True:
        with suppress(_ClaimedMeanwhile), transaction.atomic(using=tx.connection.alias):
            held = tx.fetch(OPEN_LEASES.format(ids=marks, lock=lock), job_ids)
            rows = tx.fetch(read_jobs, job_ids)
            if tx.fetch(OPEN_LEASES.format(ids=marks, lock=""), job_ids) != held:
                raise _ClaimedMeanwhile
            return rows


def stand_alone(tx: Transaction) -> None:
    """Wait until nobody else writes or holds leases; nobody does until the commit."""
    if tx.dialect.lock_rows:
        tx.execute(STAND_ALONE)


class _ClaimedMeanwhile(Exception):
    """A job was claimed between the two locks: let it go, and take its lease first."""
