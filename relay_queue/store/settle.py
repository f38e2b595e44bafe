"""Settle: ack, nack, snooze and release. Only the holder of an open lease's token may.

Each settlement ends the lease first, guarded by id, token, openness and expiry, and touches the job
only if that guard matched. What the guard turns away is refused, and written on the lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from relay_queue.backoff import MAX_DELAY_SECONDS, Backoff, Jitter
from relay_queue.exceptions import InvalidJob
from relay_queue.ranking import rank
from relay_queue.states import State
from relay_queue.store import bounds
from relay_queue.store.end import end, outcome_of
from relay_queue.store.queues import queue_aging
from relay_queue.store.records import Settled, Settlement
from relay_queue.store.transaction import Transaction

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
"""Write on a lease that its owner came back late, with which verb, and why it was refused."""

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
    """Apply what owners tell of their leases; the answers are in the order of the settlements.

    A refused settlement changes nothing but the record of the refusal on its lease. An ack that is
    told twice is answered as the success that it was, and so is whatever is told ``again``.
    """
    for told in settlements:
        if told.delay_seconds is not None:
            bounds.seconds("delay_seconds", told.delay_seconds, 0.0, MAX_DELAY_SECONDS)
    if not settlements:
        return []
    # One word per lease and round: were two told at once, the guard could not say which it took.
    first: dict[int, Settlement] = {}
    again: list[Settlement] = []
    for told in settlements:
        if first.setdefault(told.lease_id, told) is not told:
            again.append(told)
    placed = _settle_each(tx, list(first.values()))
    later = iter(settle(tx, again))
    return [
        placed[told.lease_id] if first[told.lease_id] is told else next(later)
        for told in settlements
    ]


def _settle_each(tx: Transaction, settlements: list[Settlement]) -> dict[int, Settled]:
    """Settle leases that are all different; return the answers by lease id."""
    ended = end(tx, [told for told in settlements if bounds.is_id(told.lease_id)])
    placed = {}
    failed = []
    for told in settlements:
        if told.lease_id not in ended:
            continue
        if told.verb == "ack":
            placed[told.lease_id] = _succeeded(told, *ended[told.lease_id])
        else:
            failed.append(told)
    if failed:
        placed |= _fail(tx, failed, {told.lease_id: ended[told.lease_id][0] for told in failed})
    if len(ended) < len(settlements):
        placed |= _refuse(tx, [told for told in settlements if told.lease_id not in ended])
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
    told = Settlement(
        "nack",
        lease_id,
        token,
        error=error,
        message=message,
        traceback=traceback,
        fatal=fatal,
        delay_seconds=delay_seconds,
    )
    return settle(tx, [told])[0]


def snooze(tx: Transaction, lease_id: int, token: str, seconds: float) -> Settled:
    """The function asks to be run again in ``seconds``; the attempt is not charged."""
    return settle(tx, [Settlement("snooze", lease_id, token, delay_seconds=seconds)])[0]


def release(tx: Transaction, lease_id: int, token: str) -> Settled:
    """The owner hands the job back, unrun or interrupted; the attempt is not charged."""
    return settle(tx, [Settlement("release", lease_id, token)])[0]


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
        tx.move(step.job.queue, State.RUNNING, step.state)
    tx.rows(MOVE.replace("{lookup}", tx.dialect.lookup(*MOVE_LOOKUP)), MOVE_CASTS, params)


def _backoff(base_seconds: float, max_seconds: float, jitter: Jitter) -> Backoff:
    """Return a job's back-off, or the usual one if the row was altered: the job must go on."""
    try:
        return Backoff(base_seconds, max_seconds, jitter)
    except InvalidJob:
        return Backoff()


def _succeeded(told: Settlement, job_id: int, queue: str | None) -> Settled:
    if queue is None:
        return _not_running(told, job_id)
    return Settled(told.lease_id, job_id, queue, State.SUCCEEDED)


def _not_running(told: Settlement, job_id: int) -> Settled:
    """Answer for a lease that was open though its job was not running: only damage does that."""
    return Settled(told.lease_id, job_id, "", "", "the job is not running")


def _fail(
    tx: Transaction, others: Sequence[Settlement], jobs: dict[int, int]
) -> dict[int, Settled]:
    running = {job.job_id: job for job in read_running(tx, [jobs[t.lease_id] for t in others])}
    placed = {}
    steps = []
    for told in others:
        job = running.get(jobs[told.lease_id])
        if job is None:
            placed[told.lease_id] = _not_running(told, jobs[told.lease_id])
            continue
        step = _next_step(tx, told, job)
        steps.append(step)
        placed[told.lease_id] = Settled(told.lease_id, job.job_id, job.queue, step.state)
    move(tx, steps)
    return placed


def _next_step(tx: Transaction, told: Settlement, job: RunningJob) -> Step:
    if told.verb == "release":
        step = Step(job, State.READY)
        step.attempt -= 1
        step.losses = job.losses  # handed back unrun: it says nothing of the job
        return step
    if told.verb == "snooze":
        step = Step(job, State.SCHEDULED)
        step.attempt -= 1
        back_off(tx, step, told.delay_seconds or 0.0)
        return step
    step = Step(job, State.DEAD if told.fatal or job.exhausted else State.RETRYING)
    step.error = told.message
    if step.state is State.RETRYING:
        delay = told.delay_seconds
        back_off(tx, step, job.backoff.delay_seconds(job.failures) if delay is None else delay)
    return step


def _refuse(tx: Transaction, late: Sequence[Settlement]) -> dict[int, Settled]:
    rows = tx.ids(FIND_REFUSED, bounds.ids(told.lease_id for told in late))
    found = {row[0]: row for row in rows}
    placed = {}
    for told in late:
        row = found.get(told.lease_id)
        if row is None or row[2] != told.token:
            placed[told.lease_id] = Settled(
                told.lease_id, None, "", "", "no lease has this id and token"
            )
            continue
        _, job_id, _, outcome, ended, queue, state = row
        if outcome == outcome_of(told) and (told.verb == "ack" or told.again):
            placed[told.lease_id] = Settled(told.lease_id, job_id, queue, state)
            continue
        reason = f"the lease had ended: {outcome}" if ended else "the lease had expired"
        tx.execute(RECORD_REFUSAL, [tx.now_db, told.verb, reason, told.lease_id, told.token])
        placed[told.lease_id] = Settled(told.lease_id, job_id, queue, state, reason)
    return placed
