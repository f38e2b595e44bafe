"""Renew: make a lease last, for its owner alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from relay_queue.store import bounds
from relay_queue.store.transaction import Transaction

RENEW = """
    WITH owner (lease_id, token, until) AS ({rows})
    UPDATE relay_queue_lease SET renewed_at = %s, expires_at = owner.until
    FROM owner
    WHERE relay_queue_lease.id = owner.lease_id{lookup} AND relay_queue_lease.token = owner.token
      AND relay_queue_lease.outcome IS NULL AND relay_queue_lease.expires_at > %s
    RETURNING relay_queue_lease.id
"""
"""Extend leases that their owners still hold."""

RENEW_LOOKUP = ("relay_queue_lease.id", "SELECT lease_id FROM owner")
RENEW_CASTS = ("bigint", "text", "timestamptz")


def renew(
    tx: Transaction, leases: Sequence[tuple[int, str, float]], *, waited_seconds: float = 0.0
) -> set[int]:
    """Extend leases given as (lease id, token, seconds from now); return the ids that were.

    A lease that is not among them has ended or expired: its owner must stop and may not settle.
    ``waited_seconds`` is how long ago the owner wanted to write and could not: a lease that was not
    over by then is extended, if nobody has ended it meanwhile. While it is open nobody else can have
    a token for its job.
    """
    if not leases:
        return set()
    params: list[Any] = []
    for lease_id, token, seconds in leases:
        if not bounds.is_id(lease_id):
            continue
        params += (lease_id, token, tx.dialect.to_db(tx.now + timedelta(seconds=seconds)))
    statement = RENEW.replace("{lookup}", tx.dialect.lookup(*RENEW_LOOKUP))
    wanted = tx.now_db
    if waited_seconds:
        wanted = tx.dialect.to_db(tx.now - timedelta(seconds=waited_seconds))
    return {row[0] for row in tx.rows(statement, RENEW_CASTS, params, tx.now_db, wanted)}
