"""Claims for tests: made up, or taken from the store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from relay_queue import payload, store
from relay_queue.store.records import Claim, Settled, Settlement

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
_ids = count(1)


def claim_of(task: Any, *args: Any, **kwargs: Any) -> Claim:
    """Make up the claim of a call; no row of any table stands behind it."""
    return stored_call(
        task.module_path, payload.encode(args, kwargs, max_bytes=1_000_000, max_depth=50)
    )


def stored_call(path: str, text: str) -> Claim:
    """Make up a claim with a task and a payload as they stand in the table."""
    number = next(_ids)
    return Claim(
        lease_id=number,
        token=f"{number:032x}",
        job_id=number + 1000,
        queue="default",
        backend="default",
        task=path,
        payload=text,
        idempotency_key="key",
        priority=0,
        attempt=1,
        attempts_left=2,
        suspect=False,
        lease_seconds=60.0,
        timeout_seconds=None,
        created_at=NOON,
        acquired_at=NOON,
        expires_at=NOON + timedelta(seconds=60),
        wait_seconds=0.0,
    )


def claim_next(limit: int = 1) -> list[Claim]:
    """Claim jobs of the queue ``default`` from the store."""
    with store.transaction() as tx:
        return store.claim(tx, worker_id=None, queues=["default"], limit=limit)


def settle(settlement: Settlement) -> Settled:
    """Give a settlement to the store, as the loop does."""
    with store.transaction() as tx:
        return store.settle(tx, [settlement])[0]
