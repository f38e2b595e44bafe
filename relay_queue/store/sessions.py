"""Session locks of PostgreSQL: the server drops a worker's lock when its session ends.

The key is made from the worker's random incarnation, so a lock that is free says that this very
worker has no session. It may still live: its connection was cut, or the server restarted and it has
not been back. Then its leases end too early, and their tokens fence it like any other late owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relay_queue.store.bounds import is_incarnation

if TYPE_CHECKING:
    from relay_queue.store.transaction import Transaction

RESTART_GRACE_SECONDS = 10
"""After a start of the server all locks are free, and the living need time to take theirs again."""

TRY_LOCKS = f"""
    SELECT key FROM unnest(%s::bigint[]) AS wanted (key)
    WHERE CASE WHEN now() - pg_postmaster_start_time() > interval '{RESTART_GRACE_SECONDS} seconds'
               THEN pg_try_advisory_xact_lock(key) ELSE false END
"""
"""Take those of some workers' locks that are free, until the end of the transaction."""


def lock_key(incarnation: object) -> int | None:
    """Return the key of a worker's lock: the first half of its incarnation, as a signed number.

    None for what is no incarnation: an altered row proves nothing of its worker.
    """
    if not is_incarnation(incarnation):
        return None
    return int.from_bytes(bytes.fromhex(incarnation[:16]), signed=True)


def take_locks(tx: Transaction, keys: Sequence[int]) -> set[int]:
    """Take the locks among these that nobody holds, until the commit; return their keys.

    Until then nobody else can judge these workers, nor can they come back.
    """
    return {row[0] for row in tx.fetch(TRY_LOCKS, [list(keys)])} if keys else set()
