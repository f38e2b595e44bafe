"""Claim: take ready jobs, and grant each a lease with a token of its own. Renew: make it last."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from relay_queue import payload as payload_codec
from relay_queue.states import State
from relay_queue.store.records import SUSPECT_LOSSES, Claim
from relay_queue.store.transaction import Transaction

PICK = """
    SELECT id, losses, rank FROM relay_queue_job
    WHERE queue = %s AND state = 'ready'{only}
    ORDER BY rank, id LIMIT %s{lock}
"""
"""Find the first ready jobs of one queue: a probe of the ready index."""

START = """
    UPDATE relay_queue_job
    SET state = 'running', attempt = attempt + 1, started_at = COALESCE(started_at, %s)
    WHERE id IN ({ids}) AND state = 'ready'
    RETURNING id, queue, backend, task, payload, checksum, idempotency_key, priority, attempt,
              attempt_base + max_attempts - attempt, losses, lease_seconds, timeout_seconds,
              created_at, available_at
"""
"""Move picked jobs to running and charge an attempt."""

GRANT = """
    WITH granted (job_id, attempt, token, expires_at) AS (VALUES {rows})
    INSERT INTO relay_queue_lease
        (job_id, attempt, token, expires_at, worker_id, acquired_at, error, traceback,
         refused_verb, refused_reason)
    SELECT job_id, attempt, token, expires_at, %s, %s, '', '', '', ''
    FROM granted WHERE job_id IS NOT NULL
    RETURNING id, job_id
"""
"""Open a lease for each started job."""

CONDEMN = """
    UPDATE relay_queue_job
    SET state = 'dead', attempt = attempt - 1, finished_at = %s, last_error = %s,
        started_at = CASE WHEN attempt = 1 THEN NULL ELSE started_at END
    WHERE id IN ({ids}) AND state = 'running'
"""
"""Take altered jobs back from running: no function may see them, no attempt was used."""

CLAIMABLE = """
    SELECT q.name, CASE WHEN q.max_running IS NULL THEN NULL ELSE q.max_running -
        (SELECT COALESCE(SUM(c.n), 0) FROM relay_queue_queuecount c
         WHERE c.queue = q.name AND c.state = 'running') END
    FROM relay_queue_queue q
    WHERE q.name IN ({ids}) AND q.paused_at IS NULL
      AND EXISTS (SELECT 1 FROM relay_queue_job j WHERE j.queue = q.name AND j.state = 'ready')
"""
"""Find the queues that have something to give, and how many leases each still allows."""

RENEW = """
    WITH owner (lease_id, token, until) AS (VALUES {rows})
    UPDATE relay_queue_lease SET renewed_at = %s, expires_at = owner.until
    FROM owner
    WHERE relay_queue_lease.id = owner.lease_id AND relay_queue_lease.token = owner.token
      AND relay_queue_lease.ended_at IS NULL AND relay_queue_lease.expires_at > %s
    RETURNING relay_queue_lease.id
"""
"""Extend leases that their owners still hold."""

GRANT_CASTS = ("bigint", "int", "text", "timestamptz")
RENEW_CASTS = ("bigint", "text", "timestamptz")
LEASE_SECONDS = 11
"""The place of ``lease_seconds`` in a row of ``START``."""

ALTERED = "ChecksumMismatch: the stored job is not the one that was enqueued; it was not run"


def claim(
    tx: Transaction,
    *,
    worker_id: int | None,
    queues: Sequence[str],
    limit: int,
    suspects: int = 1,
    lease_seconds: float | None = None,
    backends: Sequence[str] | None = None,
) -> list[Claim]:
    """Take up to ``limit`` ready jobs and return them with their leases, in the order of the deal.

    Places are dealt one at a time round the queues in the order given, inside a queue by rank.
    Paused queues, and those at ``max_running``, are skipped. At most ``suspects`` jobs that cost
    two owners in a row are taken. ``lease_seconds`` replaces what the jobs ask for; ``backends``
    restricts to jobs enqueued through these aliases. A job whose checksum does not fit goes dead.
    """
    if limit < 1:
        return []
    picks = {
        queue: _pick(tx, queue, room, suspects, backends)
        for queue, room in _claimable(tx, queues, limit)
    }
    dealt = _deal(picks, limit, suspects)
    if not dealt:
        return []
    started = _start(tx, dealt)
    sound = _condemn_altered(tx, started)
    if not sound:
        return []
    order = {job_id: place for place, job_id in enumerate(dealt)}
    sound.sort(key=lambda row: order[row[0]])
    return _grant(tx, sound, worker_id, lease_seconds)


def renew(tx: Transaction, leases: Sequence[tuple[int, str, float]]) -> set[int]:
    """Extend leases given as (lease id, token, seconds from now); return the ids that were.

    A lease that is not among them has ended or expired: its owner must stop and may not settle.
    """
    if not leases:
        return set()
    params: list[Any] = []
    for lease_id, token, seconds in leases:
        params += (lease_id, token, tx.dialect.to_db(tx.now + timedelta(seconds=seconds)))
    return {row[0] for row in tx.rows(RENEW, RENEW_CASTS, params, tx.now_db, tx.now_db)}


_Pick = tuple[int, bool, int]
"""A job's id, whether it is a suspect, and its rank."""


def _claimable(tx: Transaction, queues: Sequence[str], limit: int) -> list[tuple[str, int]]:
    """Return in the order given the queues that have ready jobs and room, with that room."""
    if not queues:
        return []
    rows = tx.ids(CLAIMABLE, queues)
    # What this very transaction has settled is not in the table yet, but its room is there.
    room = {
        name: limit if left is None else min(limit, left - tx.pending(name, State.RUNNING))
        for name, left in rows
    }
    return [(name, room[name]) for name in dict.fromkeys(queues) if room.get(name, 0) > 0]


def _pick(
    tx: Transaction, queue: str, limit: int, suspects: int, backends: Sequence[str] | None
) -> list[_Pick]:
    """Return the first ready jobs of a queue."""
    only, params = "", [queue]
    if backends is not None:
        only = f" AND backend IN ({', '.join(['%s'] * len(backends))})"
        params += backends
    found = _probe(tx, only, params, limit)
    if sum(suspect for _, suspect, _ in found) > suspects:
        # Look past the suspects: a row of them must not hide the innocent jobs behind.
        some = [pick for pick in found if pick[1]][:suspects]
        some += _probe(tx, f"{only} AND losses < {SUSPECT_LOSSES}", params, limit)
        found = sorted(some, key=lambda pick: (pick[2], pick[0]))[:limit]
    return found


def _probe(tx: Transaction, only: str, params: Sequence[Any], limit: int) -> list[_Pick]:
    statement = PICK.format(only=only, lock=tx.dialect.skip_locked)
    rows = tx.fetch(statement, [*params, limit])
    return [(job_id, losses >= SUSPECT_LOSSES, rank) for job_id, losses, rank in rows]


def _deal(picks: dict[str, list[_Pick]], limit: int, suspects: int) -> list[int]:
    """Deal places one at a time round the ring of queues; return the job ids in that order."""
    hands: list[Iterator[_Pick]] = [iter(hand) for hand in picks.values() if hand]
    dealt: list[int] = []
    while hands and len(dealt) < limit:
        for hand in list(hands):
            for job_id, suspect, _rank in hand:
                if suspect and suspects < 1:
                    continue
                suspects -= suspect
                dealt.append(job_id)
                break
            else:
                hands.remove(hand)
            if len(dealt) == limit:
                break
    return dealt


def _start(tx: Transaction, job_ids: Sequence[int]) -> list[tuple[Any, ...]]:
    rows = tx.ids(START, job_ids, tx.now_db)
    moved: dict[str, int] = defaultdict(int)
    for row in rows:
        moved[row[1]] += 1
    for queue, n in moved.items():
        tx.move(queue, State.READY, State.RUNNING, n)
    return rows


def _condemn_altered(tx: Transaction, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the rows whose checksum fits; the others go dead."""
    sound: list[tuple[Any, ...]] = []
    altered: list[tuple[Any, ...]] = []
    for row in rows:
        _, queue, backend, task, payload, checksum, key = row[:7]
        fits = payload_codec.checksum(queue, backend, task, payload, key) == checksum
        (sound if fits else altered).append(row)
    if altered:
        tx.ids(CONDEMN, [row[0] for row in altered], tx.now_db, ALTERED)
        for row in altered:
            tx.move(row[1], State.RUNNING, State.DEAD)
    return sound


def _grant(
    tx: Transaction,
    rows: list[tuple[Any, ...]],
    worker_id: int | None,
    lease_seconds: float | None,
) -> list[Claim]:
    claims = []
    params: list[Any] = []
    lengths: dict[float, tuple[datetime, Any]] = {}
    for row in rows:
        seconds = row[LEASE_SECONDS] if lease_seconds is None else lease_seconds
        if seconds not in lengths:
            expires_at = tx.now + timedelta(seconds=seconds)
            lengths[seconds] = (expires_at, tx.dialect.to_db(expires_at))
        expires_at, expires_db = lengths[seconds]
        granted = _claim(tx, row, seconds, expires_at)
        claims.append(granted)
        params += (granted.job_id, granted.attempt, granted.token, expires_db)
    granted_rows = tx.rows(GRANT, GRANT_CASTS, params, worker_id, tx.now_db)
    lease_ids = {job_id: lease_id for lease_id, job_id in granted_rows}
    for granted in claims:
        granted.lease_id = lease_ids[granted.job_id]
    return claims


def _claim(
    tx: Transaction, row: tuple[Any, ...], lease_seconds: float, expires_at: datetime
) -> Claim:
    (job_id, queue, backend, task, payload, _, key, priority, attempt, left, losses) = row[:11]
    (_, timeout_seconds, created, available) = row[11:]
    created_at = tx.dialect.from_db(created)
    ready_at = created_at if available == created else tx.dialect.from_db(available)
    return Claim(
        0,  # the lease's id, known once it is inserted
        secrets.token_hex(16),
        job_id,
        queue,
        backend,
        task,
        payload,
        key,
        priority,
        attempt,
        left,
        losses,
        lease_seconds,
        timeout_seconds,
        created_at,
        tx.now,
        expires_at,
        max(0.0, (tx.now - ready_at).total_seconds()),
    )
