"""Settle: ack, nack, snooze and release, and renewals. Only the holder of an open lease's token may.

Each settlement ends the lease first, guarded by id, token, openness and expiry, and touches the job
only if that guard matched. What the guard turns away is refused, and written on the lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from relay_queue import validation
from relay_queue.backoff import MAX_DELAY_SECONDS, Backoff, Jitter
from relay_queue.exceptions import InvalidJob
from relay_queue.ranking import rank
from relay_queue.states import UNCHARGED, Outcome, State, why_last
from relay_queue.store.prune import shorten_ledgers
from relay_queue.store.queues import queue_aging
from relay_queue.store.records import Settled, Settlement
from relay_queue.store.transaction import Transaction
from relay_queue.store.transitions import moved, moved_apart, note_death

END_LEASES = """
    WITH given (lease_id, token, outcome, error, traceback) AS ({rows})
    UPDATE relay_queue_lease
    SET ended_at = %s, outcome = given.outcome, error = given.error, traceback = given.traceback
    FROM given
    WHERE relay_queue_lease.id = given.lease_id AND relay_queue_lease.token = given.token
      AND relay_queue_lease.outcome IS NULL AND relay_queue_lease.expires_at > %s
    RETURNING relay_queue_lease.id, relay_queue_lease.job_id
"""
"""End the leases whose owners still hold them. An open lease has no outcome. The guard asks for
that and not for the end: a planner might walk the index of all open leases instead of looking up
these."""

SUCCEED = """
    WITH done (job_id, result) AS ({rows})
    UPDATE relay_queue_job
    SET state = 'succeeded', finished_at = %s, result = done.result, losses = 0, last_error = ''
    FROM done
    WHERE relay_queue_job.id = done.job_id AND relay_queue_job.state = 'running'
    RETURNING relay_queue_job.id, relay_queue_job.queue
"""
"""Finish the jobs whose leases were just ended as acked."""

END_AND_SUCCEED = """
    WITH given (lease_id, token, outcome, error, traceback, result) AS ({rows}),
    ended AS (
        UPDATE relay_queue_lease
        SET ended_at = %s, outcome = given.outcome, error = given.error, traceback = given.traceback
        FROM given
        WHERE relay_queue_lease.id = ANY(ARRAY(SELECT lease_id FROM given))
          AND relay_queue_lease.id = given.lease_id AND relay_queue_lease.token = given.token
          AND relay_queue_lease.outcome IS NULL AND relay_queue_lease.expires_at > %s
        RETURNING relay_queue_lease.id, job_id, given.outcome, given.result),
    acked (job_id, result) AS (SELECT * FROM unnest(
        ARRAY(SELECT job_id FROM ended WHERE outcome = 'acked'),
        ARRAY(SELECT result FROM ended WHERE outcome = 'acked'))),
    done AS (
        UPDATE relay_queue_job
        SET state = 'succeeded', finished_at = %s, result = acked.result, losses = 0, last_error = ''
        FROM acked
        WHERE relay_queue_job.id = ANY(ARRAY(SELECT job_id FROM acked))
          AND relay_queue_job.id = acked.job_id AND relay_queue_job.state = 'running'
        RETURNING relay_queue_job.id, relay_queue_job.queue)
    SELECT ended.id, ended.job_id, done.queue FROM ended LEFT JOIN done ON done.id = ended.job_id
"""
"""Both in one statement, with arrays for the reason of `Dialect.lookup`. A planner that takes the
table for empty expects that no lease is ended. It would then walk over any index to find the job of
none."""

ACK_CASTS = ("bigint", "text")

LEASE_CASTS = ("bigint", "text", "text", "text", "text")

CHAIN_CASTS = (*LEASE_CASTS, "text")

Ended = dict[int, tuple[int, str | None]]
"""By lease id: the job's id, and its queue if it has succeeded."""

READ_RUNNING = """
    SELECT id, queue, priority, rank, attempt, attempt_base, max_attempts, backoff_base_seconds,
           backoff_max_seconds, backoff_jitter, available_at, losses
    FROM relay_queue_job WHERE id IN ({ids}) AND state = 'running'
"""
"""Read what decides where a job that did not succeed goes next."""

MOVE = """
    WITH next (job_id, state, attempt, rank, available_at, finished_at, losses, error) AS
        ({rows})
    UPDATE relay_queue_job
    SET state = next.state, attempt = next.attempt, rank = next.rank,
        available_at = next.available_at, finished_at = next.finished_at,
        losses = next.losses, last_error = COALESCE(next.error, last_error)
    FROM next
    WHERE relay_queue_job.id = next.job_id{lookup} AND relay_queue_job.state = 'running'
"""
"""Send running jobs whose leases were just ended to their next state."""

MOVE_LOOKUP = ("relay_queue_job.id", "SELECT job_id FROM next")

FIND_REFUSED = """
    SELECT l.id, l.job_id, l.token, l.outcome, l.ended_at IS NOT NULL, j.queue, j.state
    FROM relay_queue_lease l JOIN relay_queue_job j ON j.id = l.job_id
    WHERE l.id IN ({ids})
"""
"""Read why leases did not match the guard."""

RECORD_REFUSAL = """
    UPDATE relay_queue_lease SET refused_at = %s, refused_verb = %s, refused_reason = %s
    WHERE id = %s AND token = %s
"""
"""Write on a lease that its owner settled too late: when, with which verb, and why it was
refused."""

MOVE_CASTS = (
    "bigint",
    "text",
    "int",
    "bigint",
    "timestamptz",
    "timestamptz",
    "int",
    "text",
)

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


def end_leases(tx: Transaction, settlements: Sequence[Settlement]) -> Ended:
    """End the leases that may be ended, and finish the jobs of those that were acked.

    The settlements are of leases that are all different.
    """
    ended: Ended
    if tx.dialect.has_writable_ctes:
        params = [
            value
            for settlement in settlements
            for value in (*_columns(settlement), settlement.result)
        ]
        rows = tx.rows(END_AND_SUCCEED, CHAIN_CASTS, params, *[tx.now_db] * 3)
        ended = {lease_id: (job_id, queue) for lease_id, job_id, queue in rows}
    else:
        params = [value for settlement in settlements for value in _columns(settlement)]
        jobs = dict(tx.rows(END_LEASES, LEASE_CASTS, params, tx.now_db, tx.now_db))
        queues = _succeed(tx, settlements, jobs)
        ended = {lease_id: (job_id, queues.get(job_id)) for lease_id, job_id in jobs.items()}
    succeeded = [(job_id, queue) for job_id, queue in ended.values() if queue is not None]
    moved(tx, succeeded, State.RUNNING, State.SUCCEEDED)
    return ended


def _columns(settlement: Settlement) -> tuple[Any, ...]:
    return (
        settlement.lease_id,
        settlement.token,
        outcome_of(settlement).value,
        settlement.error,
        settlement.traceback,
    )


def _succeed(
    tx: Transaction, settlements: Sequence[Settlement], jobs: dict[int, int]
) -> dict[int, str]:
    """Finish the jobs whose leases were ended as acked; return their queues by job id."""
    params: list[Any] = []
    for settlement in settlements:
        if settlement.verb == "ack" and settlement.lease_id in jobs:
            params += (jobs[settlement.lease_id], settlement.result)
    return dict(tx.rows(SUCCEED, ACK_CASTS, params, tx.now_db))


def outcome_of(settlement: Settlement) -> Outcome:
    """Return what a lease ends as when its owner tells this."""
    if settlement.verb == "ack":
        return Outcome.ACKED
    if settlement.verb == "snooze":
        return Outcome.SNOOZED
    if settlement.verb == "release":
        return Outcome.UNRUN if settlement.unrun else Outcome.RELEASED
    if settlement.timed_out:
        return Outcome.TIMED_OUT
    return Outcome.FATAL if settlement.fatal else Outcome.FAILED


class Step:
    """Where one running job goes: a row for ``MOVE``."""

    __slots__ = ("attempt", "available_at", "error", "finished", "job", "losses", "rank", "state")

    def __init__(self, job: RunningJob, state: State) -> None:
        self.job = job
        self.state = state
        self.attempt = job.attempt
        self.rank = job.rank
        self.available_at: Any = job.available_at
        self.finished = state is State.DEAD
        self.losses = 0
        self.error: str | None = None


class RunningJob:
    """The columns of ``READ_RUNNING``."""

    __slots__ = (
        "attempt",
        "attempt_base",
        "available_at",
        "backoff",
        "job_id",
        "losses",
        "max_attempts",
        "priority",
        "queue",
        "rank",
    )

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.job_id, self.queue, self.priority, self.rank = row[:4]
        self.attempt, self.attempt_base, self.max_attempts = row[4:7]
        self.backoff = _backoff(*row[7:10])
        self.available_at, self.losses = row[10:]

    @property
    def failures(self) -> int:
        """Charged attempts since the last requeue."""
        return int(self.attempt - self.attempt_base)

    @property
    def exhausted(self) -> bool:
        """Whether the attempt that just ended was the last of the budget."""
        return self.failures >= int(self.max_attempts)


def settle(tx: Transaction, settlements: Sequence[Settlement]) -> list[Settled]:
    """Apply the settlements of owners; the answers are in the order of the settlements.

    A refused settlement changes nothing but the record of the refusal on its lease. A second ack is
    answered as the success that it was. So is every settlement that is ``repeated``.
    """
    for settlement in settlements:
        if settlement.delay_seconds is not None:
            validation.require_seconds(
                "delay_seconds", settlement.delay_seconds, 0.0, MAX_DELAY_SECONDS
            )
    if not settlements:
        return []
    # One settlement for each lease and round. The guard works on sets: of two settlements of one
    # lease it could not say which of them it has taken.
    first: dict[int, Settlement] = {}
    later: list[Settlement] = []
    for settlement in settlements:
        if first.setdefault(settlement.lease_id, settlement) is not settlement:
            later.append(settlement)
    placed = _settle_each(tx, list(first.values()))
    later_answers = iter(settle(tx, later))
    return [
        placed[settlement.lease_id]
        if first[settlement.lease_id] is settlement
        else next(later_answers)
        for settlement in settlements
    ]


def _settle_each(tx: Transaction, settlements: list[Settlement]) -> dict[int, Settled]:
    """Settle leases that are all different; return the answers by lease id."""
    ended = end_leases(
        tx, [settlement for settlement in settlements if validation.is_id(settlement.lease_id)]
    )
    placed = {}
    failed = []
    for settlement in settlements:
        if settlement.lease_id not in ended:
            continue
        if settlement.verb == "ack":
            placed[settlement.lease_id] = _succeeded(settlement, *ended[settlement.lease_id])
        else:
            failed.append(settlement)
    if failed:
        placed |= _fail(
            tx,
            failed,
            {settlement.lease_id: ended[settlement.lease_id][0] for settlement in failed},
        )
    if len(ended) < len(settlements):
        placed |= _refuse(
            tx, [settlement for settlement in settlements if settlement.lease_id not in ended]
        )
    return placed


def ack(tx: Transaction, lease_id: int, token: str, result: str = "null") -> Settled:
    """The function returned ``result`` (JSON text): the job has succeeded."""
    return settle(tx, [Settlement("ack", lease_id, token, result=result)])[0]


def nack(
    tx: Transaction,
    lease_id: int,
    token: str,
    *,
    error: str = "",
    message: str = "",
    traceback: str = "",
    fatal: bool = False,
    delay_seconds: float | None = None,
) -> Settled:
    """The function failed: the job backs off, or goes dead when fatal or out of attempts."""
    settlement = Settlement(
        "nack",
        lease_id,
        token,
        error=error,
        message=message,
        traceback=traceback,
        fatal=fatal,
        delay_seconds=delay_seconds,
    )
    return settle(tx, [settlement])[0]


def snooze(tx: Transaction, lease_id: int, token: str, seconds: float) -> Settled:
    """The function asks to be run again in ``seconds``; the attempt is not charged."""
    return settle(tx, [Settlement("snooze", lease_id, token, delay_seconds=seconds)])[0]


def release(tx: Transaction, lease_id: int, token: str) -> Settled:
    """The owner hands the job back, unrun or interrupted; the attempt is not charged."""
    return settle(tx, [Settlement("release", lease_id, token)])[0]


def goes_to(tx: Transaction, settlement: Settlement, job_id: int) -> str | None:
    """Return the state that a settlement would take its job to; None if the job does not run."""
    if settlement.verb == "ack":
        return State.SUCCEEDED
    running = read_running(tx, [job_id])
    return _next_step(tx, settlement, running[0]).state if running else None


def read_running(tx: Transaction, job_ids: Sequence[int]) -> list[RunningJob]:
    """Return the running ones among these jobs, with what decides where they go."""
    rows = tx.ids(READ_RUNNING, job_ids)
    return [RunningJob(row) for row in rows]


def back_off(tx: Transaction, step: Step, delay_seconds: float) -> None:
    """Send a job to wait ``delay_seconds``; it rejoins its class at that time."""
    due = tx.now + timedelta(seconds=delay_seconds)
    step.available_at = tx.dialect.to_db(due)
    step.rank = rank(due, step.job.priority, queue_aging(tx, step.job.queue))


def move(tx: Transaction, steps: Sequence[Step]) -> None:
    """Write where running jobs go, and count it."""
    params: list[Any] = []
    for step in steps:
        finished_at = tx.now_db if step.finished else None
        params += (step.job.job_id, step.state.value, step.attempt, step.rank)
        params += (step.available_at, finished_at, step.losses, step.error)
    moved_apart(tx, ((s.job.job_id, s.job.queue, State.RUNNING, s.state) for s in steps))
    tx.rows(MOVE.replace("{lookup}", tx.dialect.lookup(*MOVE_LOOKUP)), MOVE_CASTS, params)


def _backoff(base_seconds: float, max_seconds: float, jitter: Jitter) -> Backoff:
    """Return a job's back-off, or the usual one if the row was altered: the job must go on."""
    try:
        return Backoff(base_seconds, max_seconds, jitter)
    except InvalidJob:
        return Backoff()


def _succeeded(settlement: Settlement, job_id: int, queue: str | None) -> Settled:
    if queue is None:
        return _not_running(settlement, job_id)
    return Settled(settlement.lease_id, job_id, queue, State.SUCCEEDED)


def _not_running(settlement: Settlement, job_id: int) -> Settled:
    """Answer for a lease that was open though its job was not running: only damage does that."""
    return Settled(settlement.lease_id, job_id, "", "", "the job is not running")


def _fail(
    tx: Transaction, others: Sequence[Settlement], jobs: dict[int, int]
) -> dict[int, Settled]:
    running = {job.job_id: job for job in read_running(tx, [jobs[t.lease_id] for t in others])}
    placed = {}
    steps = []
    for settlement in others:
        job = running.get(jobs[settlement.lease_id])
        if job is None:
            placed[settlement.lease_id] = _not_running(settlement, jobs[settlement.lease_id])
            continue
        step = _next_step(tx, settlement, job)
        steps.append(step)
        if step.state is State.DEAD and not settlement.death_logged:
            why = why_last(fatal=settlement.fatal, attempt=job.attempt)
            note_death(tx, job.job_id, why, settlement.message)
        placed[settlement.lease_id] = Settled(
            settlement.lease_id, job.job_id, job.queue, step.state
        )
    move(tx, steps)
    _shorten(tx, others, jobs)
    return placed


def _shorten(tx: Transaction, others: Sequence[Settlement], jobs: dict[int, int]) -> None:
    """Keep the ledgers of jobs short that are snoozed or handed back again and again."""
    outcomes = {jobs[settlement.lease_id]: outcome_of(settlement) for settlement in others}
    shorten_ledgers(
        tx,
        [(job_id, outcome.value) for job_id, outcome in outcomes.items() if outcome in UNCHARGED],
    )


def _next_step(tx: Transaction, settlement: Settlement, job: RunningJob) -> Step:
    if settlement.verb == "release":
        step = Step(job, State.READY)
        step.attempt -= 1
        step.losses = job.losses  # handed back unrun: that says nothing of the job
        return step
    if settlement.verb == "snooze":
        step = Step(job, State.SCHEDULED)
        step.attempt -= 1
        back_off(tx, step, settlement.delay_seconds or 0.0)
        return step
    step = Step(job, State.DEAD if settlement.fatal or job.exhausted else State.RETRYING)
    step.error = settlement.message
    if step.state is State.RETRYING:
        delay = settlement.delay_seconds
        back_off(tx, step, job.backoff.delay_seconds(job.failures) if delay is None else delay)
    return step


def _refuse(tx: Transaction, late: Sequence[Settlement]) -> dict[int, Settled]:
    rows = tx.ids(FIND_REFUSED, validation.valid_ids(settlement.lease_id for settlement in late))
    found = {row[0]: row for row in rows}
    placed = {}
    for settlement in late:
        row = found.get(settlement.lease_id)
        if row is None or row[2] != settlement.token:
            placed[settlement.lease_id] = Settled(
                settlement.lease_id, None, "", "", "no lease has this id and token"
            )
            continue
        _, job_id, _, outcome, ended, queue, state = row
        if outcome == outcome_of(settlement) and (settlement.verb == "ack" or settlement.repeated):
            placed[settlement.lease_id] = Settled(settlement.lease_id, job_id, queue, state)
            continue
        reason = f"the lease had ended: {outcome}" if ended else "the lease had expired"
        tx.execute(
            RECORD_REFUSAL,
            [tx.now_db, settlement.verb, reason, settlement.lease_id, settlement.token],
        )
        placed[settlement.lease_id] = Settled(settlement.lease_id, job_id, queue, state, reason)
    return placed


def renew(
    tx: Transaction, leases: Sequence[tuple[int, str, float]], *, waited_seconds: float = 0.0
) -> set[int]:
    """Extend leases given as (lease id, token, seconds from now); return the ids that were.

    A lease that is not among them has ended or expired: its owner must stop and may not settle.
    ``waited_seconds`` is how long ago the owner wanted to write and could not. A lease that was not
    over by then is extended, unless it was ended meanwhile. While it is open there is no other
    token for its job.
    """
    if not leases:
        return set()
    params: list[Any] = []
    for lease_id, token, seconds in leases:
        if not validation.is_id(lease_id):
            continue
        params += (lease_id, token, tx.dialect.to_db(tx.now + timedelta(seconds=seconds)))
    statement = RENEW.replace("{lookup}", tx.dialect.lookup(*RENEW_LOOKUP))
    wanted = tx.now_db
    if waited_seconds:
        wanted = tx.dialect.to_db(tx.now - timedelta(seconds=waited_seconds))
    return {row[0] for row in tx.rows(statement, RENEW_CASTS, params, tx.now_db, wanted)}
