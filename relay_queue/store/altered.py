"""Altered: a stored job whose checksum does not fit is not the one that was enqueued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from relay_queue import payload as payload_codec
from relay_queue.store.transaction import Transaction
from relay_queue.store.trial import passes

ALTERED: Final = "ChecksumMismatch: the stored job is not the one that was enqueued; it was not run"

READ_SIGNED = """
    SELECT queue, backend, task, payload, checksum, idempotency_key
    FROM relay_queue_job WHERE id = %s
"""
"""Read what the checksum of one job is made of, and the checksum."""


class NoChecksumFits(ValueError):
    """Checksums fail for a reason that is not in the rows: the columns may have another type now."""


def fits(signed: Sequence[Any]) -> bool:
    """Say whether the columns of ``READ_SIGNED`` are those of a job as it was enqueued."""
    queue, backend, task, payload, checksum, key = signed
    return bool(payload_codec.checksum(queue, backend, task, payload, key) == checksum)


def require_sound(tx: Transaction, queue: str) -> None:
    """Make sure, before jobs are condemned by their checksums, that the checksum of a new job fits.

    A change of a column's type may alter what is read of every job. Raises `NoChecksumFits`.
    """
    if not passes(tx, queue, lambda where, job_id: fits(where.fetch(READ_SIGNED, [job_id])[0])):
        raise NoChecksumFits(
            "checksums of jobs do not fit, and that of a new job either does not or could not be "
            "tried: was the type of a column of relay_queue_job changed?"
        )
