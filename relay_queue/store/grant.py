"""Grant: start the picked jobs, and open a lease with a token of its own for each. Both engines, side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from relay_queue import clock
from relay_queue.states import ROW_ALTERED, State
from relay_queue.store.records import SUSPECT_LOSSES, Claim
from relay_queue.store.transaction import Transaction
from relay_queue.store.transitions import JobInQueue, moved, note_death
from relay_queue.store.trial import ALTERED, fits, require_sound

TOKEN_BYTES = 16
"""Random bytes in a token: 128 bits cannot be guessed."""

Pick = tuple[Any, ...]
"""The row of a picked job: its id, whether it is a suspect, and unless careful its terms."""

PICKED = f"id, losses >= {SUSPECT_LOSSES}"
"""What tells whether a job is to be taken; it can be read even of a row that was altered."""

COLUMNS = """, queue, backend, task, payload, checksum, idempotency_key, priority, attempt + 1,
    attempt_base + max_attempts - attempt - 1, lease_seconds, timeout_seconds,
    CAST(created_at AS text), CAST(available_at AS text), {clock}"""
"""What else the owner of its lease must know, as it will be once an attempt is charged."""

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

MARK_ALTERED = """
    UPDATE relay_queue_job SET state = 'dead', finished_at = %s, last_error = %s
    WHERE id IN ({ids}) AND state = 'ready'
"""
"""Send altered jobs to the dead letters: no function may see them, and no attempt is charged."""

GRANT_CASTS = ("bigint", "int", "text", "timestamptz")

LEASE_SECONDS = 11
"""The place of ``lease_seconds`` in a pick."""

CLOCK = 15
"""The place of what the server's clock said when the job was picked."""

PICK_START_AND_GRANT = f"""
    WITH picked AS (
        SELECT place, losses, (%s::text[])[row_number() OVER ()] AS token FROM ({{pick}}) AS first),
    looked AS (
        SELECT GREATEST(%s::timestamptz, COALESCE(%s::timestamptz, {{clock}})) AS at
        FROM picked HAVING max(losses) < {SUSPECT_LOSSES}),
    started AS (
        UPDATE relay_queue_job
        SET state = 'running', attempt = attempt + 1,
            started_at = COALESCE(started_at, (SELECT at FROM looked))
        FROM picked
        WHERE relay_queue_job.ctid = picked.place AND state = 'ready'
          AND EXISTS (SELECT 1 FROM looked)
        RETURNING rank, id, queue, backend, task, payload, checksum, idempotency_key, priority,
            attempt, attempt_base + max_attempts - attempt AS attempts_left,
            COALESCE(%s::float8, lease_seconds) AS lease_seconds, timeout_seconds,
            created_at, available_at, token, (SELECT at FROM looked) AS acquired_at),
    granted AS (
        INSERT INTO relay_queue_lease
            (job_id, attempt, token, expires_at, worker_id, acquired_at, error, traceback,
             refused_verb, refused_reason)
        SELECT id, attempt, token, acquired_at + lease_seconds * interval '1 second',
               %s::bigint, acquired_at, '', '', '', ''
        FROM started
        RETURNING id, job_id)
    SELECT (ARRAY(SELECT id FROM granted ORDER BY job_id))[row_number() OVER (ORDER BY id)],
           token, id, queue, backend, task, payload, checksum, idempotency_key, priority,
           attempt, attempts_left, lease_seconds, timeout_seconds,
           CAST(created_at AS text), CAST(available_at AS text), CAST(acquired_at AS text)
    FROM started ORDER BY rank, id
"""
"""Pick the first ready jobs, move them to running, charge an attempt and open a lease for each.

All of the jobs are locked first, then the clock is read, and then the rows are changed in their
place. A place in a table is good for as long as one statement holds the lock. Nothing is taken if
one of them is a suspect: `claim` decides how many of those may be taken, and which jobs are passed
over. Jobs and leases are paired in the order of the jobs' ids, for two reasons. A role may have
rights on tables alone, and then only the insert itself may draw from the sequence of leases. And a
join of two sets without an index would compare each row with each."""

TAKE_BACK = "DELETE FROM relay_queue_lease WHERE id IN ({ids})"
"""Take back leases that were granted a moment ago in the same transaction."""

MARK_TAKEN = """
    UPDATE relay_queue_job
    SET state = 'dead', finished_at = %s, last_error = %s, attempt = attempt - 1,
        started_at = NULLIF(started_at, %s)
    WHERE id IN ({ids}) AND state = 'running'
"""
"""Take altered jobs out as if they had not been started now: an earlier start stays."""


def draw_tokens(count: int) -> list[str]:
    """Return new tokens, 32 hexadecimal digits each."""
    # One draw for all: the system call costs more than the randomness.
    drawn, width = os.urandom(TOKEN_BYTES * count).hex(), TOKEN_BYTES * 2
    return [drawn[place : place + width] for place in range(0, len(drawn), width)]


@lru_cache(maxsize=8)
def pick_columns(clock: str) -> str:
    """Return the columns to read of a job that is picked; ``clock`` is the expression for the clock of the server."""
    return PICKED + COLUMNS.format(clock=clock)


def grant(
    tx: Transaction, picks: list[Pick], worker_id: int | None, lease_seconds: float | None
) -> list[Claim]:
    """Start jobs and grant their leases; the answers are in the order of the picks."""
    sound = _mark_altered(tx, picks)
    if not sound:
        return []
    now = _granted_at(tx, sound)
    claims, params = _prepare(tx, sound, lease_seconds, now)
    lease_ids = _start(tx, params, worker_id, tx.dialect.to_db(now))
    claims = [claimed for claimed in claims if claimed.job_id in lease_ids]
    for claimed in claims:
        claimed.lease_id = lease_ids[claimed.job_id]
    moved(tx, [(c.job_id, c.queue) for c in claims], State.READY, State.RUNNING)
    return claims


def grant_one(
    tx: Transaction, job_id: int, worker_id: int | None, lease_seconds: float | None
) -> list[Claim]:
    """Take one job, if it is still ready."""
    picks = tx.fetch(READ_READY.format(columns=pick_columns(tx.dialect.clock)), [job_id])
    return grant(tx, picks, worker_id, lease_seconds)


def _mark_altered(tx: Transaction, picks: list[Pick]) -> list[Pick]:
    """Return the picks whose checksum fits; the others go dead."""
    sound: list[Pick] = []
    altered: list[Pick] = []
    for pick in picks:
        (sound if fits(pick[2:8]) else altered).append(pick)
    if altered:
        if not sound:
            require_sound(tx, altered[0][2])
        tx.ids(MARK_ALTERED, [pick[0] for pick in altered], tx.now_db, ALTERED)
        _bury(tx, [(pick[0], pick[2]) for pick in altered])
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
    if tx.dialect.has_writable_ctes:
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
    by_length: dict[float, _LeaseTimes] = {}
    for pick, token in zip(picks, draw_tokens(len(picks)), strict=True):
        seconds = pick[LEASE_SECONDS] if lease_seconds is None else lease_seconds
        times = by_length.get(seconds)
        if times is None:
            until = now + timedelta(seconds=seconds)
            times = by_length[seconds] = _LeaseTimes(seconds, now, until, tx.dialect.to_db(until))
        claimed = _claim_of_pick(tx, pick, token, times)
        claims.append(claimed)
        params += (claimed.job_id, claimed.attempt, token, times.until_db)
    return claims, params


class _LeaseTimes(NamedTuple):
    """The life of leases of one length."""

    seconds: float
    since: datetime
    until: datetime
    until_db: Any


def _claim_of_pick(tx: Transaction, pick: Pick, token: str, times: _LeaseTimes) -> Claim:
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
        times.seconds,
        None if timeout_seconds is None else float(timeout_seconds),
        created_at,
        times.since,
        times.until,
        max(0.0, (times.since - ready_at).total_seconds()),
    )


def start_and_grant(
    tx: Transaction,
    pick: str,
    params: Sequence[Any],
    *,
    worker_id: int | None,
    lease_seconds: float | None,
    drawn: list[str],
) -> list[Claim]:
    """Claim the jobs that ``pick`` finds, each under one of the tokens ``drawn``; none if one is a suspect.

    ``pick`` selects ``ctid AS place`` and ``losses``, and ``params`` are its parameters. A lease
    begins when the jobs have been locked: where many write at once, another transaction may have
    ended the last one after ours read the clock. A job whose checksum does not fit goes dead.
    """
    fixed = clock.overridden()
    times = (tx.read_now_db, None if fixed is None else tx.dialect.to_db(fixed))
    statement = _statement(pick, tx.dialect.clock)
    rows = tx.fetch(statement, [drawn, *params, *times, lease_seconds, worker_id])
    altered = [row for row in rows if not _row_fits(row)]
    if altered:
        if len(altered) == len(rows):
            require_sound(tx, altered[0][3])
        _take_back_altered(tx, altered)
        rows = [row for row in rows if _row_fits(row)]
    if not rows:
        return []
    moved(tx, [(row[2], row[3]) for row in rows], State.READY, State.RUNNING)
    since = tx.dialect.from_db(rows[0][-1])
    return [_claim_of_row(tx, row, since) for row in rows]


@lru_cache(maxsize=64)
def _statement(pick: str, clock: str) -> str:
    return PICK_START_AND_GRANT.format(pick=pick, clock=clock)


def _row_fits(row: tuple[Any, ...]) -> bool:
    return fits(row[3:9])


def _take_back_altered(tx: Transaction, rows: Sequence[tuple[Any, ...]]) -> None:
    tx.ids(TAKE_BACK, [row[0] for row in rows])
    tx.ids(MARK_TAKEN, [row[2] for row in rows], tx.now_db, ALTERED, rows[0][-1])
    _bury(tx, [(row[2], row[3]) for row in rows])


def _bury(tx: Transaction, altered: Sequence[JobInQueue]) -> None:
    """Note that jobs went dead whose checksums do not fit."""
    moved(tx, altered, State.READY, State.DEAD)
    for job_id, _ in altered:
        note_death(tx, job_id, ROW_ALTERED, ALTERED)


def _claim_of_row(tx: Transaction, row: tuple[Any, ...], since: datetime) -> Claim:
    seconds, timeout_seconds, created, available = row[12:16]
    created_at = tx.dialect.from_db(created)
    ready_at = created_at if available == created else tx.dialect.from_db(available)
    waited = max(0.0, (since - ready_at).total_seconds())
    expires_at = since + timedelta(seconds=seconds)
    times: list[Any] = [seconds, timeout_seconds, created_at, since, expires_at, waited]
    # The columns are in the order of a claim, but for the checksum among them; none is a suspect.
    return Claim(*[*row[:7], *row[8:12], False, *times])
