"""Recover: end the leases whose time or owner is gone. Promote: wake the jobs that are due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from relay_queue import validation
from relay_queue.backoff import Backoff
from relay_queue.states import NOT_DUE, Outcome, State, sql_list, why_last
from relay_queue.store.dialects import marks
from relay_queue.store.grant import grant_one
from relay_queue.store.records import SUSPECT_LOSSES, Recovered
from relay_queue.store.settle import RunningJob, Step, back_off, move, read_running
from relay_queue.store.transaction import Transaction
from relay_queue.store.transitions import moved_apart, note_death
from relay_queue.store.trial import Trial, TrialStep, sound_job

FIND_EXPIRED = """
    SELECT id, job_id FROM relay_queue_lease
    WHERE ended_at IS NULL AND expires_at <= %s ORDER BY expires_at LIMIT %s{lock}
"""
"""Find open leases whose time is over: a probe of the expiry index."""

FIND_OF_WORKERS = """
    SELECT id, job_id FROM relay_queue_lease
    WHERE ended_at IS NULL AND worker_id IN ({workers}) ORDER BY expires_at LIMIT %s{lock}
"""
"""Find the open leases of workers that are known to be dead. The order makes the planner use the
index of open leases; with an order by id it would read the whole ledger."""

END_EXPIRED = """
    UPDATE relay_queue_lease SET ended_at = %s, outcome = 'expired'
    WHERE id IN ({ids}) AND ended_at IS NULL AND expires_at <= %s
    RETURNING id, job_id
"""
"""End leases by time; checked again, since another owner may have renewed."""

END_LOST = """
    UPDATE relay_queue_lease SET ended_at = %s, outcome = 'lost'
    WHERE id IN ({ids}) AND ended_at IS NULL AND worker_id IN ({workers})
    RETURNING id, job_id
"""
"""End the leases of dead owners."""

FIND_DUE = f"""
    SELECT id, queue, state FROM relay_queue_job
    WHERE state IN ({sql_list(NOT_DUE)}) AND available_at <= %s
    ORDER BY available_at LIMIT %s{{lock}}
"""
"""Find waiting jobs whose time has come: a probe of the due index."""

PROMOTE = f"""
    UPDATE relay_queue_job SET state = 'ready'
    WHERE id IN ({{ids}}) AND state IN ({sql_list(NOT_DUE)})
"""
"""Make due jobs ready. Their rank was set when they began to wait."""

LOSS_BACKOFF = Backoff(base_seconds=1.0, max_seconds=300.0, jitter="full")
"""Jobs that lost two owners come back at different times, and not all at once as they were lost."""

LONG_OVER_SECONDS = -3600.0
"""The length of a lease that has ended before it began, to try a recovery with."""

MESSAGES = {
    Outcome.LOST: "the worker died; the effect of this attempt is unknown",
    Outcome.EXPIRED: "the lease ran out; the effect of this attempt is unknown",
}


def recover_expired(
    tx: Transaction, limit: int = 1000, *, trial: Trial | None = None
) -> list[Recovered]:
    """End up to ``limit`` leases whose time is over, and send their jobs on.

    With a ``trial`` each is ended in a savepoint of its own, and a job whose row is proven to be at
    fault goes dead. Without one such a row raises.
    """
    find = FIND_EXPIRED.format(lock=tx.dialect.skip_locked)
    found = tx.fetch(find, [tx.now_db, limit])
    guard = [tx.now_db]
    return _end(tx, found, Outcome.EXPIRED, statement=END_EXPIRED, guard=guard, trial=trial)


def recover_dead(
    tx: Transaction, worker_ids: Sequence[int], limit: int = 1000, *, trial: Trial | None = None
) -> list[Recovered]:
    """End up to ``limit`` leases of workers that are proven dead, and send their jobs on.

    The proof is the caller's: it holds the dead worker's lock. Time alone proves nothing.
    ``trial`` is as in `recover_expired`.
    """
    worker_ids = validation.valid_ids(worker_ids)
    if not worker_ids:
        return []
    workers = marks(len(worker_ids))
    find = FIND_OF_WORKERS.format(workers=workers, lock=tx.dialect.skip_locked)
    found = tx.fetch(find, [*worker_ids, limit])
    end = END_LOST.replace("{workers}", workers)
    guard = list(worker_ids)
    return _end(tx, found, Outcome.LOST, statement=end, guard=guard, trial=trial)


def _end(
    tx: Transaction,
    found: Sequence[tuple[Any, ...]],
    outcome: Outcome,
    *,
    statement: str,
    guard: list[Any],
    trial: Trial | None,
) -> list[Recovered]:
    """End the leases found, if the guard still holds for them, and send their jobs on."""

    def end(where: Transaction, lease_ids: list[int]) -> list[Recovered]:
        sql = statement.format(ids=marks(len(lease_ids)))
        return _send_on(where, where.fetch(sql, [tx.now_db, *lease_ids, *guard]), outcome)

    def lose(where: Transaction, job_id: int) -> bool:
        worker_id = guard[0] if outcome is Outcome.LOST else None
        taken = grant_one(where, job_id, worker_id, LONG_OVER_SECONDS)
        return bool(taken) and bool(end(where, [claim.lease_id for claim in taken]))

    def lose_sound(where: Transaction, queue: str, item: tuple[Any, ...]) -> bool:
        # Back to its place, then to wait, and at the end of its budget: where the row would go
        # stands in the row, and this may be what was altered.
        often = sound_job(where, queue, SUSPECT_LOSSES + 1)
        lost = all(lose(where, often) for _ in range(SUSPECT_LOSSES))
        return lost and lose(where, sound_job(where, queue, 1))

    def goes_to(where: Transaction, item: tuple[Any, ...]) -> str | None:
        running = read_running(where, [item[1]])
        return _step(where, running[0], running[0].losses + 1, outcome).state if running else None

    if found:
        tx.wake()
    if trial is None:
        return end(tx, [lease_id for lease_id, _ in found]) if found else []
    step: TrialStep[tuple[Any, ...], Recovered] = TrialStep(
        "recover jobs",
        lambda where, lease: end(where, [lease[0]]),
        job_of=lambda lease: lease[1],
        control=lose_sound,
        goes_to=goes_to,
    )
    return trial.each(tx, step, found)


def promote(tx: Transaction, limit: int = 1000, *, trial: Trial | None = None) -> dict[str, int]:
    """Make up to ``limit`` due jobs ready; return how many per queue.

    With a ``trial`` each is made ready in a savepoint of its own. A job for which that fails stays
    as it is: no attempt of it was lost, and its row may be mended.
    """
    rows = tx.fetch(FIND_DUE.format(lock=tx.dialect.skip_locked), [tx.now_db, limit])
    if not rows:
        return {}
    if trial is not None:
        made: Counter[str] = Counter()
        for row in rows:
            made.update(trial.spare(tx, "wake jobs", partial(_make_ready, rows=[row])) or {})
        return dict(made)
    return _make_ready(tx, rows)


def _make_ready(tx: Transaction, rows: Sequence[tuple[Any, ...]]) -> dict[str, int]:
    tx.execute(PROMOTE.format(ids=marks(len(rows))), [row[0] for row in rows])
    tx.wake()
    promoted: dict[str, int] = {}
    moved_apart(tx, ((*row, State.READY) for row in rows))
    for _, queue, _state in rows:
        promoted[queue] = promoted.get(queue, 0) + 1
    return promoted


def _send_on(
    tx: Transaction, ended: Sequence[tuple[Any, ...]], outcome: Outcome
) -> list[Recovered]:
    """Move the jobs of leases that were just ended for their owners."""
    leases = {job_id: lease_id for lease_id, job_id in ended}
    if not leases:
        return []
    steps = [_step(tx, job, job.losses + 1, outcome) for job in read_running(tx, list(leases))]
    move(tx, steps)
    for step in steps:
        if step.state is State.DEAD:
            why = why_last(fatal=False, attempt=step.job.attempt)
            note_death(tx, step.job.job_id, why, MESSAGES[outcome])
    return [
        Recovered(leases[s.job.job_id], s.job.job_id, s.job.queue, outcome, s.state) for s in steps
    ]


def _step(tx: Transaction, job: RunningJob, losses: int, outcome: Outcome) -> Step:
    """Return where a lost job goes: to its old place at first, from the second loss on it waits."""
    if job.exhausted:
        state = State.DEAD
    else:
        state = State.READY if losses < SUSPECT_LOSSES else State.RETRYING
    step = Step(job, state)
    step.losses = losses
    step.error = MESSAGES[outcome]
    if state is State.RETRYING:
        back_off(tx, step, LOSS_BACKOFF.delay_seconds(losses - 1))
    return step
