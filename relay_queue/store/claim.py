"""Claim: take ready jobs, and grant each a lease with a token of its own. Renew: make it last."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from relay_queue import payload as payload_codec
from relay_queue.states import State
from relay_queue.store import bounds
from relay_queue.store.condemn import UNREADABLE, condemn, reraise_unless_data
from relay_queue.store.records import SUSPECT_LOSSES, Claim
from relay_queue.store.transaction import Transaction, transaction

PICK = """
    SELECT id, losses >= {suspect} FROM relay_queue_job
    WHERE queue = %s AND state = 'ready'{only}
    ORDER BY rank, id LIMIT %s{lock}
"""
"""Find the first ready jobs of one queue: a probe of the ready index."""

START = f"""
    UPDATE relay_queue_job
    SET state = 'running', attempt = attempt + 1, started_at = COALESCE(started_at, %s)
    WHERE id IN ({{ids}}) AND state = 'ready'
    RETURNING id, queue, backend, task, payload, checksum, idempotency_key, priority, attempt,
              attempt_base + max_attempts - attempt, losses >= {SUSPECT_LOSSES}, lease_seconds, timeout_seconds,
              CAST(created_at AS text), CAST(available_at AS text)
"""
"""Move picked jobs to running and charge an attempt."""

GRANT = """
    WITH granted (job_id, attempt, token, expires_at) AS ({rows})
    INSERT INTO relay_queue_lease
        (job_id, attempt, token, expires_at, worker_id, acquired_at, error, traceback,
         refused_verb, refused_reason)
    SELECT job_id, attempt, token, expires_at, CAST(%s AS bigint), %s, '', '', '', ''
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

HOLD_LIMITED = """
    SELECT name FROM relay_queue_queue
    WHERE name IN ({{ids}}) AND max_running IS NOT NULL ORDER BY name{lock}
"""
"""Keep other claims from queues that limit them. In the order of names, so that no two wait crosswise."""

CLAIMABLE = """
    SELECT q.name, CASE WHEN q.max_running IS NULL THEN NULL ELSE q.max_running -
        (SELECT CAST(COALESCE(SUM(c.n), 0) AS bigint) FROM relay_queue_queuecount c
         WHERE c.queue = q.name AND c.state = 'running') END
    FROM relay_queue_queue q
    WHERE q.name IN ({ids}) AND q.paused_at IS NULL
      AND EXISTS (SELECT 1 FROM relay_queue_job j WHERE j.queue = q.name AND j.state = 'ready')
"""
"""Find the queues that have something to give, and how many leases each still allows."""

RENEW = """
    WITH owner (lease_id, token, until) AS ({rows})
    UPDATE relay_queue_lease SET renewed_at = %s, expires_at = owner.until
    FROM owner
    WHERE relay_queue_lease.id = owner.lease_id AND relay_queue_lease.token = owner.token
      AND relay_queue_lease.outcome IS NULL AND relay_queue_lease.expires_at > %s
    RETURNING relay_queue_lease.id
"""
"""Extend leases that their owners still hold."""

GRANT_CASTS = ("bigint", "int", "text", "timestamptz")
RENEW_CASTS = ("bigint", "text", "timestamptz")
TOKEN_BYTES = 16
"""Random bytes in a token: nobody guesses 128 bits."""

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
    careful: bool = False,
) -> list[Claim]:
    """Take up to ``limit`` ready jobs and return them with their leases, in the order of the deal.

    Places are dealt one at a time round the queues in the order given, inside a queue by rank.
    Paused queues, and those at ``max_running``, are skipped. At most ``suspects`` jobs that cost
    two owners in a row are taken. ``lease_seconds`` replaces what the jobs ask for; ``backends``
    restricts to jobs enqueued through these aliases. A job whose checksum does not fit goes dead.
    ``careful`` takes each job in a savepoint of its own, and a row that cannot be read goes dead,
    too; otherwise such a row raises.
    """
    if limit < 1 or backends == []:
        return []
    claimable = _claimable(tx, queues, limit)
    # A queue's fair share first; more only if the others leave places.
    share = -(-limit // max(1, len(claimable)))
    hands = [_Hand(_picks(tx, queue, share, room, backends), room) for queue, room in claimable]
    dealt = _deal(hands, limit, suspects)
    if careful:
        return [c for job_id in dealt for c in _take_alone(tx, job_id, worker_id, lease_seconds)]
    return _take(tx, dealt, worker_id, lease_seconds) if dealt else []


def renew(tx: Transaction, leases: Sequence[tuple[int, str, float]]) -> set[int]:
    """Extend leases given as (lease id, token, seconds from now); return the ids that were.

    A lease that is not among them has ended or expired: its owner must stop and may not settle.
    """
    if not leases:
        return set()
    params: list[Any] = []
    for lease_id, token, seconds in leases:
        if not bounds.is_id(lease_id):
            continue
        params += (lease_id, token, tx.dialect.to_db(tx.now + timedelta(seconds=seconds)))
    return {row[0] for row in tx.rows(RENEW, RENEW_CASTS, params, tx.now_db, tx.now_db)}


_Pick = tuple[int, bool]
"""A job's id, and whether it is a suspect."""


def _claimable(tx: Transaction, queues: Sequence[str], limit: int) -> list[tuple[str, int]]:
    """Return in the order given the queues that have ready jobs and room, with that room."""
    if not queues:
        return []
    rows = tx.ids(CLAIMABLE, queues)
    if tx.dialect.lock_rows and any(left is not None for _, left in rows):
        # In two statements: the counters must be read after the wait for the lock.
        tx.ids(HOLD_LIMITED.format(lock=tx.dialect.lock_rows), queues)
        rows = tx.ids(CLAIMABLE, queues)
    # What this very transaction has settled is not in the table yet, but its room is there.
    room = {
        name: limit if left is None else min(limit, left - tx.pending(name, State.RUNNING))
        for name, left in rows
    }
    return [(name, room[name]) for name in dict.fromkeys(queues) if room.get(name, 0) > 0]


def _picks(
    tx: Transaction, queue: str, share: int, room: int, backends: Sequence[str] | None
) -> Iterator[_Pick]:
    """Yield the first ready jobs of a queue in the order of their ranks, asking when asked."""
    only, params = "", [queue]
    if backends is not None:
        only = f" AND backend IN ({', '.join(['%s'] * len(backends))})"
        params += backends
    seen: set[int] = set()
    # A fair share, then all there is room for, then past the suspects among them: a row of those
    # must not hide the innocent jobs behind.
    innocent = f"{only} AND losses < {SUSPECT_LOSSES}"
    for where, wanted in ((only, min(share, room)), (only, room), (innocent, 2 * room)):
        if wanted <= len(seen):
            continue
        found = _probe(tx, where, params, wanted)
        for pick in found:
            if pick[0] not in seen:
                seen.add(pick[0])
                yield pick
        if len(found) < wanted:
            return


def _probe(tx: Transaction, only: str, params: Sequence[Any], limit: int) -> list[_Pick]:
    statement = PICK.format(only=only, suspect=SUSPECT_LOSSES, lock=tx.dialect.skip_locked)
    return [(job_id, bool(suspect)) for job_id, suspect in tx.fetch(statement, [*params, limit])]


@dataclass(slots=True)
class _Hand:
    """What one queue has to give: its picks, and how many leases it allows."""

    picks: Iterator[_Pick]
    room: int

    def next_id(self, suspects_allowed: int) -> tuple[int, bool] | None:
        """Return the next job and whether it is a suspect, or None when there is none to give."""
        if self.room < 1:
            return None
        for job_id, suspect in self.picks:
            if not suspect or suspects_allowed > 0:
                self.room -= 1
                return job_id, suspect
        return None


def _deal(hands: list[_Hand], limit: int, suspects: int) -> list[int]:
    """Deal places one at a time round the ring of queues; return the job ids in that order."""
    dealt: list[int] = []
    while hands and len(dealt) < limit:
        for hand in list(hands):
            given = hand.next_id(suspects)
            if given is None:
                hands.remove(hand)
                continue
            dealt.append(given[0])
            suspects -= given[1]
            if len(dealt) == limit:
                break
    return dealt


def _take(
    tx: Transaction, job_ids: list[int], worker_id: int | None, lease_seconds: float | None
) -> list[Claim]:
    """Start jobs and grant their leases; the answers are in the order of the ids."""
    sound = _condemn_altered(tx, _start(tx, job_ids))
    order = {job_id: place for place, job_id in enumerate(job_ids)}
    sound.sort(key=lambda row: order[row[0]])
    return _grant(tx, sound, worker_id, lease_seconds)


def _take_alone(
    tx: Transaction, job_id: int, worker_id: int | None, lease_seconds: float | None
) -> list[Claim]:
    """Take one job in a savepoint; one whose row cannot be read goes dead instead."""
    try:
        with transaction() as savepoint:
            return _take(savepoint, [job_id], worker_id, lease_seconds)
    except UNREADABLE as error:
        reraise_unless_data(tx, error)
        condemn(tx, job_id, error)
        return []


def _start(tx: Transaction, job_ids: Sequence[int]) -> list[tuple[Any, ...]]:
    rows = tx.ids(START, job_ids, tx.now_db)
    for queue, n in Counter(row[1] for row in rows).items():
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
    # One draw for all tokens: the system call costs more than the randomness.
    tokens = os.urandom(TOKEN_BYTES * len(rows)).hex()
    width = TOKEN_BYTES * 2
    lengths: dict[float, tuple[datetime, Any]] = {}
    for place, row in enumerate(rows):
        token = tokens[place * width : (place + 1) * width]
        seconds = row[LEASE_SECONDS] if lease_seconds is None else lease_seconds
        if seconds not in lengths:
            expires_at = tx.now + timedelta(seconds=seconds)
            lengths[seconds] = (expires_at, tx.dialect.to_db(expires_at))
        expires_at, expires_db = lengths[seconds]
        granted = _claim(tx, row, token, seconds, expires_at)
        claims.append(granted)
        params += (granted.job_id, granted.attempt, granted.token, expires_db)
    granted_rows = tx.rows(GRANT, GRANT_CASTS, params, worker_id, tx.now_db)
    lease_ids = {job_id: lease_id for lease_id, job_id in granted_rows}
    for granted in claims:
        granted.lease_id = lease_ids[granted.job_id]
    return claims


def _claim(
    tx: Transaction,
    row: tuple[Any, ...],
    token: str,
    lease_seconds: float,
    expires_at: datetime,
) -> Claim:
    (job_id, queue, backend, task, payload, _, key, priority, attempt, left, suspect) = row[:11]
    (_, timeout_seconds, created, available) = row[11:]
    created_at = tx.dialect.from_db(created)
    ready_at = created_at if available == created else tx.dialect.from_db(available)
    return Claim(
        0,  # the lease's id, known once it is inserted
        token,
        job_id,
        queue,
        backend,
        task,
        payload,
        key,
        priority,
        attempt,
        left,
        bool(suspect),
        lease_seconds,
        None if timeout_seconds is None else float(timeout_seconds),
        created_at,
        tx.now,
        expires_at,
        max(0.0, (tx.now - ready_at).total_seconds()),
    )
