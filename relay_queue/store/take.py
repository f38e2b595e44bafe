"""Take: claim from an only queue in one statement, where one statement may change two tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from relay_queue import clock
from relay_queue.states import State
from relay_queue.store.altered import ALTERED, fits, require_sound
from relay_queue.store.records import SUSPECT_LOSSES, Claim
from relay_queue.store.transaction import Transaction

TAKE = f"""
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

They are locked first, all of them, then the clock is read, and then they are changed where they lie:
a place in a table is good for as long as one statement holds the lock. Nothing is taken if there is
a suspect among them: how many of those may be taken, and who is passed over for them, is for `claim`
to deal with. Jobs and leases are paired in the order of the jobs' ids, for two reasons: the sequence of
leases may be drawn from only by the insert itself, where a role has rights on tables alone; and of two
sets without an index a join would compare each with each."""

TAKE_BACK = "DELETE FROM relay_queue_lease WHERE id IN ({ids})"
"""Take back leases that were granted a moment ago in the same transaction."""

CONDEMN_TAKEN = """
    UPDATE relay_queue_job
    SET state = 'dead', finished_at = %s, last_error = %s, attempt = attempt - 1,
        started_at = NULLIF(started_at, %s)
    WHERE id IN ({ids}) AND state = 'running'
"""
"""Take altered jobs out as if they had not been started now: an earlier start stays."""


def take(
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
    told = clock.told()
    times = (tx.read_now_db, None if told is None else tx.dialect.to_db(told))
    statement = _statement(pick, tx.dialect.clock)
    rows = tx.fetch(statement, [drawn, *params, *times, lease_seconds, worker_id])
    altered = [row for row in rows if not _fits(row)]
    if altered:
        if len(altered) == len(rows):
            require_sound(tx, altered[0][3])
        _condemn(tx, altered)
        rows = [row for row in rows if _fits(row)]
    if not rows:
        return []
    tx.move(rows[0][3], State.READY, State.RUNNING, len(rows))
    since = tx.dialect.from_db(rows[0][-1])
    return [_claim(tx, row, since) for row in rows]


@lru_cache(maxsize=64)
def _statement(pick: str, clock: str) -> str:
    return TAKE.format(pick=pick, clock=clock)


def _fits(row: tuple[Any, ...]) -> bool:
    return fits(row[3:9])


def _condemn(tx: Transaction, rows: Sequence[tuple[Any, ...]]) -> None:
    tx.ids(TAKE_BACK, [row[0] for row in rows])
    tx.ids(CONDEMN_TAKEN, [row[2] for row in rows], tx.now_db, ALTERED, rows[0][-1])
    tx.move(rows[0][3], State.READY, State.DEAD, len(rows))


def _claim(tx: Transaction, row: tuple[Any, ...], since: datetime) -> Claim:
    seconds, timeout_seconds, created, available = row[12:16]
    created_at = tx.dialect.from_db(created)
    ready_at = created_at if available == created else tx.dialect.from_db(available)
    waited = max(0.0, (since - ready_at).total_seconds())
    expires_at = since + timedelta(seconds=seconds)
    times: list[Any] = [seconds, timeout_seconds, created_at, since, expires_at, waited]
    # The columns are in the order of a claim, but for the checksum among them; none is a suspect.
    return Claim(*[*row[:7], *row[8:12], False, *times])
