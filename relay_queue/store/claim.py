"""Claim: take ready jobs, and grant each a lease with a token of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import lru_cache, partial
from typing import Any, NamedTuple

from relay_queue import clock
from relay_queue.states import State
from relay_queue.store import tokens
from relay_queue.store.altered import ALTERED, fits, require_sound
from relay_queue.store.deal import Hand, Pick, deal
from relay_queue.store.records import SUSPECT_LOSSES, Claim
from relay_queue.store.take import take
from relay_queue.store.transaction import Transaction
from relay_queue.store.trial import Step, Trial

PICKED = f"id, losses >= {SUSPECT_LOSSES}"
"""What tells whether a job is to be taken; it can be read even of a row that was altered."""

TERMS = """, queue, backend, task, payload, checksum, idempotency_key, priority, attempt + 1,
    attempt_base + max_attempts - attempt - 1, lease_seconds, timeout_seconds,
    CAST(created_at AS text), CAST(available_at AS text), {clock}"""
"""What else its owner must know, as it will be once an attempt is charged."""

PICK = """
    SELECT {columns} FROM relay_queue_job
    WHERE queue = %s AND state = 'ready'{only}
    ORDER BY rank, id LIMIT %s{lock}
"""
"""Find the first ready jobs of one queue: a probe of the ready index."""

STILL_UNLIMITED = """ AND EXISTS (
        SELECT 1 FROM relay_queue_queue q
        WHERE q.name = %s AND q.paused_at IS NULL AND q.max_running IS NULL)"""
"""Part of ``PICK``: the queue is neither paused nor limited."""

READ_READY = "SELECT {columns} FROM relay_queue_job WHERE id = %s AND state = 'ready'"
"""Read one job that was picked."""

START = """
    UPDATE relay_queue_job
    SET state = 'running', attempt = attempt + 1, started_at = COALESCE(started_at, %s)
    WHERE id IN ({ids}) AND state = 'ready'
    RETURNING id
"""
"""Move picked jobs to running and charge an attempt."""

GRANT = """
    INSERT INTO relay_queue_lease
        (job_id, attempt, token, expires_at, worker_id, acquired_at, error, traceback,
         refused_verb, refused_reason)
    SELECT job_id, attempt, token, expires_at, CAST(%s AS bigint), %s, '', '', '', ''
    FROM granted WHERE job_id IS NOT NULL
    RETURNING job_id, id
"""
"""Open a lease for each started job."""

GRANT_ROWS = f"WITH granted (job_id, attempt, token, expires_at) AS ({{rows}}) {GRANT}"

START_AND_GRANT = f"""
    WITH picked (job_id, attempt, token, expires_at) AS ({{rows}}),
    started AS (
        UPDATE relay_queue_job
        SET state = 'running', attempt = picked.attempt, started_at = COALESCE(started_at, %s)
        FROM picked
        WHERE relay_queue_job.id = ANY(ARRAY(SELECT job_id FROM picked))
          AND relay_queue_job.id = picked.job_id AND relay_queue_job.state || '' = 'ready'
        RETURNING relay_queue_job.id),
    granted AS (SELECT picked.* FROM picked JOIN started ON started.id = picked.job_id)
    {GRANT}
"""
"""Both in one statement; see `settle.END_AND_SUCCEED` for the array. The state is asked for in a way that
no index answers: the one of ready jobs would be walked over instead."""

CONDEMN = """
    UPDATE relay_queue_job SET state = 'dead', finished_at = %s, last_error = %s
    WHERE id IN ({ids}) AND state = 'ready'
"""
"""Take altered jobs out: no function may see them, no attempt is used."""

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

GRANT_CASTS = ("bigint", "int", "text", "timestamptz")

MOST_TRIED = 64
"""Jobs that a trial looks at, at least, to find those that can be taken."""

LEASE_SECONDS = 11
"""The place of ``lease_seconds`` in a pick."""

CLOCK = 15
"""The place of what the server's clock said when the job was picked."""


def claim(
    tx: Transaction,
    *,
    worker_id: int | None,
    queues: Sequence[str],
    limit: int,
    suspects: int = 1,
    lease_seconds: float | None = None,
    backends: Sequence[str] | None = None,
    trial: Trial | None = None,
) -> list[Claim]:
    """Take up to ``limit`` ready jobs and return them with their leases, in the order of the deal.

    Places are dealt one at a time round the queues in the order given, inside a queue by rank.
    Paused queues, and those at ``max_running``, are skipped. At most ``suspects`` jobs that cost
    two owners in a row are taken. ``lease_seconds`` replaces what the jobs ask for; ``backends``
    restricts to jobs enqueued through these aliases. A job whose checksum does not fit goes dead.
    With a ``trial`` each job is taken in a savepoint of its own, and one whose row is proven to be
    at fault goes dead, too; otherwise such a row raises.
    """
    if limit < 1 or backends == []:
        return []
    only = _only(queues, backends)
    if only is not None and tx.dialect.chains_writes and trial is None:
        if claims := _take_at_once(tx, only, limit, worker_id, lease_seconds):
            return claims
        only = None
    probe = partial(_probe, tx, PICKED if trial else _columns(tx.dialect.clock))
    # In a trial some will not be taken, and must not hide those behind them.
    wanted = limit if trial is None else max(limit, MOST_TRIED)
    dealt = deal(_only_hand(probe, only, wanted), wanted, suspects)
    if not dealt:
        dealt = deal(_hands(tx, probe, queues, wanted, backends), wanted, suspects)
    if trial is None:
        return _take(tx, dealt, worker_id, lease_seconds)
    step: Step[int, Claim] = Step(
        "claim jobs",
        lambda where, job_id: take_one(where, job_id, worker_id, lease_seconds),
        job_of=lambda job_id: job_id,
        control=lambda where, sound: take_one(where, sound, worker_id, lease_seconds),
    )
    return trial.each(tx, step, [pick[0] for pick in dealt], enough=limit)


_Probe = Callable[[str, Sequence[Any]], list[Pick]]
"""Finds the first ready jobs of a queue that fulfil a condition."""


_unlimited: set[str] = set()
"""Queues without a limit, when this process last looked."""


_Only = tuple[str, Sequence[Any]]
"""The condition of an only queue, with its parameters."""


def _only(queues: Sequence[str], backends: Sequence[str] | None) -> _Only | None:
    """Return how to search an only queue that had no limit: the search asks whether that holds."""
    if len(queues) != 1 or queues[0] not in _unlimited:
        return None
    where, params = _among(backends)
    return STILL_UNLIMITED + where, [queues[0], queues[0], *params]


def _take_at_once(
    tx: Transaction, only: _Only, limit: int, worker_id: int | None, lease_seconds: float | None
) -> list[Claim]:
    where, params = only
    return take(
        tx,
        _pick("ctid AS place, losses", where, tx.dialect.skip_locked),
        [*params, limit],
        worker_id=worker_id,
        lease_seconds=lease_seconds,
        drawn=tokens.draw(limit),
    )


def _only_hand(probe: _Probe, only: _Only | None, limit: int) -> list[Hand]:
    if only is None:
        return []
    return [Hand(_picks(probe, *only, limit, limit), limit)]


def _hands(
    tx: Transaction,
    probe: _Probe,
    queues: Sequence[str],
    limit: int,
    backends: Sequence[str] | None,
) -> list[Hand]:
    """Return the hands of all queues that have something to give."""
    claimable = _claimable(tx, queues, limit)
    # A queue's fair share first; more only if the others leave places.
    share = -(-limit // max(1, len(claimable)))
    where, params = _among(backends)
    return [
        Hand(_picks(probe, where, [queue, *params], share, room), room) for queue, room in claimable
    ]


def _among(backends: Sequence[str] | None) -> tuple[str, Sequence[str]]:
    """Return the part of ``PICK`` that restricts it to backends, with its parameters."""
    if backends is None:
        return "", ()
    return f" AND backend IN ({', '.join(['%s'] * len(backends))})", backends


def _claimable(tx: Transaction, queues: Sequence[str], limit: int) -> list[tuple[str, int]]:
    """Return in the order given the queues that have ready jobs and room, with that room."""
    if not queues:
        return []
    rows = tx.ids(CLAIMABLE, queues)
    if tx.dialect.lock_rows and any(left is not None for _, left in rows):
        # In two statements: the counters must be read after the wait for the lock.
        tx.ids(HOLD_LIMITED.format(lock=tx.dialect.lock_rows), queues)
        rows = tx.ids(CLAIMABLE, queues)
    _unlimited.update(name for name, left in rows if left is None)
    _unlimited.difference_update(name for name, left in rows if left is not None)
    # What this very transaction has settled is not in the table yet, but its room is there.
    room = {
        name: limit if left is None else min(limit, left - tx.pending(name, State.RUNNING))
        for name, left in rows
    }
    return [(name, room[name]) for name in dict.fromkeys(queues) if room.get(name, 0) > 0]


def _picks(
    probe: _Probe, only: str, params: Sequence[Any], share: int, room: int
) -> Iterator[Pick]:
    """Yield the first ready jobs of a queue in the order of their ranks, asking when asked."""
    seen: set[int] = set()
    # A fair share, then all there is room for, then past the suspects among them: a row of those
    # must not hide the innocent jobs behind.
    innocent = f"{only} AND losses < {SUSPECT_LOSSES}"
    for where, wanted in ((only, min(share, room)), (only, room), (innocent, 2 * room)):
        if wanted <= len(seen):
            continue
        found = probe(where, [*params, wanted])
        for pick in found:
            if pick[0] not in seen:
                seen.add(pick[0])
                yield pick
        if len(found) < wanted:
            return


def _probe(tx: Transaction, columns: str, only: str, params: Sequence[Any]) -> list[Pick]:
    return tx.fetch(_pick(columns, only, tx.dialect.skip_locked), params)


@lru_cache(maxsize=8)
def _columns(clock: str) -> str:
    return PICKED + TERMS.format(clock=clock)


@lru_cache(maxsize=64)
def _pick(columns: str, only: str, lock: str) -> str:
    return PICK.format(columns=columns, only=only, lock=lock)


def _take(
    tx: Transaction, picks: list[Pick], worker_id: int | None, lease_seconds: float | None
) -> list[Claim]:
    """Start jobs and grant their leases; the answers are in the order of the picks."""
    sound = _condemn_altered(tx, picks)
    if not sound:
        return []
    now = _granted_at(tx, sound)
    claims, params = _prepare(tx, sound, lease_seconds, now)
    lease_ids = _start(tx, params, worker_id, tx.dialect.to_db(now))
    claims = [claimed for claimed in claims if claimed.job_id in lease_ids]
    for claimed in claims:
        claimed.lease_id = lease_ids[claimed.job_id]
    for queue, n in Counter(claimed.queue for claimed in claims).items():
        tx.move(queue, State.READY, State.RUNNING, n)
    return claims


def take_one(
    tx: Transaction, job_id: int, worker_id: int | None, lease_seconds: float | None
) -> list[Claim]:
    """Take one job, if it is still ready."""
    picks = tx.fetch(READ_READY.format(columns=_columns(tx.dialect.clock)), [job_id])
    return _take(tx, picks, worker_id, lease_seconds)


def _condemn_altered(tx: Transaction, picks: list[Pick]) -> list[Pick]:
    """Return the picks whose checksum fits; the others go dead."""
    sound: list[Pick] = []
    altered: list[Pick] = []
    for pick in picks:
        (sound if fits(pick[2:8]) else altered).append(pick)
    if altered:
        if not sound:
            require_sound(tx, altered[0][2])
        tx.ids(CONDEMN, [pick[0] for pick in altered], tx.now_db, ALTERED)
        for pick in altered:
            tx.move(pick[2], State.READY, State.DEAD)
    return sound


def _granted_at(tx: Transaction, picks: list[Pick]) -> datetime:
    """Return when leases on these jobs begin: not before their last ones have ended.

    Where many write at once, another transaction may have ended one after ours read the clock, and
    before it looked for jobs.
    """
    readings = [pick[CLOCK] for pick in picks if pick[CLOCK] is not None]
    if not readings:
        return tx.now
    return max(tx.now, clock.of_database(tx.dialect.from_db(max(readings))))


def _start(
    tx: Transaction, params: list[Any], worker_id: int | None, now_db: Any
) -> dict[int, int]:
    """Move jobs to running, each with a lease; return the leases of those that were still ready."""
    if tx.dialect.chains_writes:
        rest = (now_db, worker_id, now_db)
        return dict(tx.rows(START_AND_GRANT, GRANT_CASTS, params, *rest))
    width = len(GRANT_CASTS)
    started = {row[0] for row in tx.ids(START, params[::width], now_db)}
    if len(started) * width < len(params):
        rows = [params[place : place + width] for place in range(0, len(params), width)]
        params = [value for row in rows if row[0] in started for value in row]
    return dict(tx.rows(GRANT_ROWS, GRANT_CASTS, params, worker_id, now_db))


def _prepare(
    tx: Transaction, picks: list[Pick], lease_seconds: float | None, now: datetime
) -> tuple[list[Claim], list[Any]]:
    """Return the claims, still without the ids of their leases, and the rows for these."""
    claims = []
    params: list[Any] = []
    spans: dict[float, _Span] = {}
    for pick, token in zip(picks, tokens.draw(len(picks)), strict=True):
        seconds = pick[LEASE_SECONDS] if lease_seconds is None else lease_seconds
        span = spans.get(seconds)
        if span is None:
            until = now + timedelta(seconds=seconds)
            span = spans[seconds] = _Span(seconds, now, until, tx.dialect.to_db(until))
        claimed = _claim(tx, pick, token, span)
        claims.append(claimed)
        params += (claimed.job_id, claimed.attempt, token, span.until_db)
    return claims, params


class _Span(NamedTuple):
    """The life of leases of one length."""

    seconds: float
    since: datetime
    until: datetime
    until_db: Any


def _claim(tx: Transaction, pick: Pick, token: str, span: _Span) -> Claim:
    (job_id, suspect, queue, backend, task, payload, _, key, priority, attempt, left) = pick[:11]
    (_, timeout_seconds, created, available) = pick[LEASE_SECONDS:CLOCK]
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
        span.seconds,
        None if timeout_seconds is None else float(timeout_seconds),
        created_at,
        span.since,
        span.until,
        max(0.0, (span.since - ready_at).total_seconds()),
    )
