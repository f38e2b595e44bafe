"""Schedules: declared by code, and fired once for each slot by whichever worker comes first.

A slot leaves a row that says what became of it, the job that it made, and the time of the next one, in
one transaction: all of it is there, or none. The row of a schedule is locked and its time moves on, so a
slot is fired once; the unique row of the slot keeps that so when an old backup is restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from django.db import DatabaseError

from relay_queue import payload as payload_codec
from relay_queue.backoff import Backoff
from relay_queue.exceptions import (
    IdempotencyConflict,
    InvalidJob,
    InvalidSchedule,
    QueueFull,
    RelayError,
)
from relay_queue.states import TERMINAL, Missed, Overlap, RunOutcome, State
from relay_queue.store.dialects import marks
from relay_queue.store.enqueue import build_job, enqueue, job_options
from relay_queue.store.operate import cancel
from relay_queue.store.records import Enqueued, NewJob
from relay_queue.store.transaction import Transaction, transaction
from relay_queue.store.trial import UNREADABLE
from relay_queue.timing import Cron, Every, Timing, key_of, slots_between

LATE: Final = timedelta(seconds=60)
"""A slot that is fired later than this has been missed: a tick that waits for the writer is not late."""

MOST_SLOTS: Final = 1_000
"""Slots that are looked back for: a schedule of every minute may have slept for a year."""

MOST_MISSED: Final = 100
"""Missed slots that run, at the most, where all of them are to run."""

TERMS: Final = (
    *("queue", "backend", "task", "payload", "priority", "max_attempts", "lease_seconds"),
    *("timeout_seconds", "backoff_base_seconds", "backoff_max_seconds", "backoff_jitter"),
)
"""The columns that say what a job of the schedule is."""

WHEN: Final = ("cron", "zone", "every_seconds", "start_at", "end_at")
"""The columns that say when it runs: with another value of one, slots begin from now."""

HOW: Final = ("jitter_seconds", "missed", "missed_window_seconds", "overlap")

DECLARED: Final = (*TERMS, *WHEN, *HOW)

READ_ALL: Final = f"""
    SELECT id, name, source, paused_at, retired_at, fault, next_at, {", ".join(DECLARED)}
    FROM relay_queue_schedule ORDER BY name{{lock}}
"""
"""Read all schedules, which are few, and keep others from changing them."""

INSERT: Final = f"""
    INSERT INTO relay_queue_schedule
        (name, source, fault, next_at, created_at, updated_at, {", ".join(DECLARED)})
    VALUES (%s, %s, '', %s, %s, %s, {marks(len(DECLARED))})
    ON CONFLICT (name) DO NOTHING
"""
"""Add a schedule, unless another deploy has just done so."""

UPDATE: Final = f"""
    UPDATE relay_queue_schedule SET source = %s, fault = '', retired_at = NULL, next_at = %s,
        updated_at = %s, {", ".join(f"{name} = %s" for name in DECLARED)}
    WHERE id = %s
"""
"""Change a schedule to what the code says now."""

RETIRE: Final = """
    UPDATE relay_queue_schedule SET retired_at = %s, next_at = NULL, updated_at = %s
    WHERE id = %s AND retired_at IS NULL
"""
"""Let a schedule stand still that the code does not declare any more. Its history stays."""

READ_ONE: Final = f"""
    SELECT id, name, last_job_id, next_at, {", ".join(DECLARED)}, paused_at, retired_at, fault
    FROM relay_queue_schedule WHERE name = %s{{lock}}
"""
"""Read one schedule, and keep workers from firing it."""

FIND_DUE: Final = f"""
    SELECT id, name, last_job_id, next_at, updated_at, {", ".join(DECLARED)}
    FROM relay_queue_schedule WHERE next_at <= %s ORDER BY next_at LIMIT %s{{lock}}
"""
"""Find the schedules whose next slot has come, but for those that another worker fires now."""

MOVE_ON: Final = """
    UPDATE relay_queue_schedule SET next_at = %s, last_slot_at = COALESCE(%s, last_slot_at),
        last_job_id = COALESCE(%s, last_job_id) WHERE id = %s
"""
"""Note what was fired, and when the next slot is."""

STAND_STILL: Final = """
    UPDATE relay_queue_schedule SET next_at = NULL, fault = %s, updated_at = %s WHERE id = %s
"""
"""Let a schedule stand still that cannot go on, with the reason."""

SET_PAUSE: Final = """
    UPDATE relay_queue_schedule SET paused_at = %s, next_at = %s, updated_at = %s WHERE id = %s
"""
"""Pause a schedule, or let it go on."""

NOTE_RUN: Final = """
    INSERT INTO relay_queue_schedulerun
        (schedule_id, slot_at, manual, outcome, n, reason, job_id, fired_at)
    VALUES (%s, %s, %s, %s, %s, %s, NULL, %s)
    ON CONFLICT (schedule_id, slot_at, manual) DO NOTHING RETURNING id
"""
"""Note what becomes of a slot, unless that was noted before."""

NOTE_JOB: Final = "UPDATE relay_queue_schedulerun SET job_id = %s WHERE id = %s"
"""Note the job of a slot."""

NOTE_REFUSAL: Final = """
    UPDATE relay_queue_schedulerun SET outcome = %s, reason = %s WHERE id = %s
"""
"""Note why a slot has no job."""

READ_LAST: Final = "SELECT state, last_error, finished_at FROM relay_queue_job WHERE id = %s"
"""Read how the job of the slot before stands."""

UNKNOWN_TASK: Final = "UnknownTask:"
"""How the last error of a job begins whose task is not in the code."""

MAX_REASON_CHARS: Final = 500

WAIT: Final = "20ms"
"""How long one schedule waits for a lock. All the worker's jobs wait behind it."""


class Declared(NamedTuple):
    """A schedule as the code declares it: the columns of ``DECLARED`` by their names."""

    name: str
    columns: Mapping[str, Any]


@dataclass(slots=True)
class Synced:
    """What `sync_schedules` did, as the names of schedules."""

    added: list[str]
    changed: list[str]
    retired: list[str]


@dataclass(slots=True)
class _Row:
    """A schedule at work: its columns and its timing."""

    id: int
    name: str
    last_job_id: int | None
    next_at: datetime
    columns: Mapping[str, Any]
    timing: Timing


def timing_of(columns: Mapping[str, Any]) -> Timing:
    """Return the timing that columns of a schedule describe. Raises `InvalidSchedule`."""
    if columns["cron"]:
        return Cron(columns["cron"], columns["zone"])
    if columns["start_at"] is None:
        return Every(columns["every_seconds"])
    return Every(columns["every_seconds"], columns["start_at"])


def next_slot(columns: Mapping[str, Any], moment: datetime) -> datetime | None:
    """Return the first slot later than a moment, inside ``start_at`` and ``end_at``; None if none is."""
    start_at, end_at = columns["start_at"], columns["end_at"]
    if start_at is not None:
        moment = max(moment, start_at - timedelta(microseconds=1))
    slot = timing_of(columns).after(moment)
    return None if slot is None or (end_at is not None and slot > end_at) else slot


def sync_schedules(tx: Transaction, source: str, declared: Sequence[Declared]) -> Synced:
    """Make the schedules of one ``source`` what its code declares.

    A schedule that is new, timed in another way, or declared again begins from now: no slot of the
    past runs. A pause stays. One that is not declared any more retires. Raises `InvalidSchedule` for a
    name that belongs to another source; nothing is changed then.
    """
    done = Synced([], [], [])
    known = {row["name"]: row for row in _all(tx)}
    for name, columns in declared:
        row = known.pop(name, None)
        if row is None:
            values = [_to_db(tx, columns[column]) for column in DECLARED]
            next_at = _to_db(tx, next_slot(columns, tx.now))
            tx.execute(INSERT, [name, source, next_at, tx.now_db, tx.now_db, *values])
            done.added.append(name)
            continue
        if row["source"] != source:
            raise InvalidSchedule(
                f"the schedule {name!r} belongs to {row['source']}, and {source} declares it, too. Use "
                'another name, or set RELAY["PROJECT"] if both are one project'
            )
        if _differs(row, columns):
            _change(tx, row, source, columns)
            done.changed.append(name)
    for row in known.values():
        if row["source"] == source and row["retired_at"] is None:
            tx.execute(RETIRE, [tx.now_db, tx.now_db, row["id"]])
            done.retired.append(row["name"])
    if done.added or done.changed:
        tx.wake()  # a worker that sleeps until its next look may have less time than that
    return done


def _all(tx: Transaction) -> list[dict[str, Any]]:
    names = ("id", "name", "source", "paused_at", "retired_at", "fault", "next_at", *DECLARED)
    rows = tx.fetch(READ_ALL.format(lock=tx.dialect.lock_rows))
    return [_decoded(tx, dict(zip(names, row, strict=True))) for row in rows]


def _decoded(tx: Transaction, row: dict[str, Any]) -> dict[str, Any]:
    for name in ("start_at", "end_at", "next_at", "updated_at"):
        if row.get(name) is not None:
            row[name] = tx.dialect.from_db(row[name])
    return row


def _to_db(tx: Transaction, value: Any) -> Any:
    return tx.dialect.to_db(value) if isinstance(value, datetime) else value


def _differs(row: Mapping[str, Any], columns: Mapping[str, Any]) -> bool:
    back = row["retired_at"] is not None or bool(row["fault"])
    return back or any(row[name] != columns[name] for name in DECLARED)


def _change(
    tx: Transaction, row: Mapping[str, Any], source: str, columns: Mapping[str, Any]
) -> None:
    begins = row["next_at"] is None or any(row[name] != columns[name] for name in WHEN)
    next_at = next_slot(columns, tx.now) if begins else row["next_at"]
    if row["paused_at"] is not None:
        next_at = None
    values = [_to_db(tx, columns[column]) for column in DECLARED]
    tx.execute(UPDATE, [source, _to_db(tx, next_at), tx.now_db, *values, row["id"]])


# -- an operator acts


def pause_schedule(tx: Transaction, name: str) -> bool:
    """Let a schedule stand still; its slots meanwhile are no backlog. False if it is paused already.

    Raises `InvalidSchedule` if there is none of this name.
    """
    row = _one(tx, name)
    if row["paused_at"] is not None:
        return False
    tx.execute(SET_PAUSE, [tx.now_db, None, tx.now_db, row["id"]])
    return True


def resume_schedule(tx: Transaction, name: str) -> bool:
    """Let a paused schedule go on from now. False if it is not paused. Raises like `pause_schedule`."""
    row = _one(tx, name)
    if row["paused_at"] is None:
        return False
    still = row["retired_at"] is not None or row["fault"]
    next_at = None if still else next_slot(row, tx.now)
    tx.execute(SET_PAUSE, [None, _to_db(tx, next_at), tx.now_db, row["id"]])
    tx.wake()
    return True


def run_schedule(tx: Transaction, name: str) -> int:
    """Enqueue the job of a schedule now, whatever its pause and its overlap say; return its id.

    Its slots go on as they were. Raises `InvalidSchedule` if there is none of this name, and what an
    enqueue raises; nothing is written then.
    """
    row = _one(tx, name)
    job = _job(row["name"], row, tx.now, jitter=False, manual=True)
    ((run_id,),) = tx.fetch(
        NOTE_RUN, [row["id"], tx.now_db, True, RunOutcome.ENQUEUED.value, 1, "", tx.now_db]
    ) or ((None,),)
    if run_id is None:
        raise InvalidSchedule(f"the schedule {name!r} was run by hand at this very moment already")
    job_id = enqueue(tx, job).job_id
    tx.execute(NOTE_JOB, [job_id, run_id])
    return job_id


def _one(tx: Transaction, name: str) -> dict[str, Any]:
    names = ("id", "name", "last_job_id", "next_at", *DECLARED, "paused_at", "retired_at", "fault")
    rows = tx.fetch(READ_ONE.format(lock=tx.dialect.lock_rows), [name])
    if not rows:
        raise InvalidSchedule(
            f"there is no schedule {name!r}; relay schedules lists them. One that the code declares is "
            "there after migrate, or relay schedules sync"
        )
    return _decoded(tx, dict(zip(names, rows[0], strict=True)))


# -- a worker fires


def fire_schedules(tx: Transaction, limit: int = 100) -> int:
    """Fire up to ``limit`` schedules whose slots have come; return how many.

    Each in a savepoint of its own: one that cannot be fired stands still with the reason.
    """
    rows = tx.fetch(FIND_DUE.format(lock=tx.dialect.skip_locked), [tx.now_db, limit])
    if not rows:
        return 0
    # A user's open transaction may be filling a queue with a capacity.
    with tx.waiting_at_most(WAIT):
        fired = sum(_fire_apart(tx, row) for row in rows)
    if fired:
        tx.wake()
    return fired


def _fire_apart(tx: Transaction, row: tuple[Any, ...]) -> bool:
    """Fire one schedule in a savepoint; False if it has to wait for somebody, and is tried again."""
    names = ("id", "name", "last_job_id", "next_at", "updated_at", *DECLARED)
    try:
        with transaction(rings=False) as savepoint:
            _fire(savepoint, dict(zip(names, row, strict=True)), tx.now)
    except (RelayError, *UNREADABLE) as error:
        trouble = tx.dialect.diagnose(error) if isinstance(error, DatabaseError) else "data"
        if trouble == "busy" and tx.dialect.lock_rows:
            return False
        if trouble != "data":
            raise  # a table, a right or the disk is at fault, and no schedule
        reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]
        tx.execute(STAND_STILL, [reason, tx.now_db, row[0]])
    return True


def _fire(tx: Transaction, values: dict[str, Any], now: datetime) -> None:
    """Fire the slots of one schedule that have come, and set its next one."""
    columns = _decoded(tx, values)
    row = _Row(
        columns["id"],
        columns["name"],
        columns["last_job_id"],
        columns["next_at"],
        columns,
        timing_of(columns),
    )
    if _lacks_its_task(tx, row):
        reason = f"its task {columns['task']} is not in the code: job {row.last_job_id} is dead"
        tx.execute(STAND_STILL, [reason, tx.now_db, row.id])
        return
    until = now if columns["end_at"] is None else min(now, columns["end_at"])
    slots = slots_between(row.timing, row.next_at, until, MOST_SLOTS)
    wanted, missed = _choose(row, slots, now)
    if missed:
        _note_missed(tx, row, missed, more=len(slots) == MOST_SLOTS)
    for slot in wanted:
        row.last_job_id = _run(tx, row, slot) or row.last_job_id
    last = _to_db(tx, slots[0]) if slots else None
    next_at = _to_db(tx, next_slot(columns, now))
    tx.execute(MOVE_ON, [next_at, last, row.last_job_id, row.id])


def _choose(
    row: _Row, slots: Sequence[datetime], now: datetime
) -> tuple[list[datetime], list[datetime]]:
    """Return which slots run, oldest first, and which were missed, newest first."""
    in_time = [slot for slot in slots if now - slot <= LATE]
    late = [slot for slot in slots if now - slot > LATE]
    window = timedelta(seconds=row.columns["missed_window_seconds"])
    inside = [slot for slot in late if now - slot <= window]
    made_up = {Missed.ONCE: inside[:1], Missed.SKIP: [], Missed.ALL: inside[-MOST_MISSED:]}
    run = made_up[Missed(row.columns["missed"])]
    return [*reversed([*in_time, *run])], [slot for slot in late if slot not in set(run)]


def _note_missed(tx: Transaction, row: _Row, missed: Sequence[datetime], *, more: bool) -> None:
    reason = f"no worker was there{f'; {MOST_SLOTS:,} slots or more' if more else ''}"
    slot_at = tx.dialect.to_db(missed[0])
    values = [row.id, slot_at, False, RunOutcome.MISSED.value, len(missed), reason, tx.now_db]
    tx.fetch(NOTE_RUN, values)


def _run(tx: Transaction, row: _Row, slot: datetime) -> int | None:
    """Enqueue the job of one slot, and note what became of it; return the job's id, if it has one."""
    outcome, reason = RunOutcome.ENQUEUED, ""
    overlap = Overlap(row.columns["overlap"])
    if overlap is not Overlap.ALLOW and _is_unfinished(tx, row.last_job_id):
        if overlap is Overlap.SKIP:
            outcome, reason = RunOutcome.SKIPPED, f"job {row.last_job_id} is unfinished"
        else:
            reason = f"job {row.last_job_id} was cancelled for it"
    values = [row.id, tx.dialect.to_db(slot), False, outcome.value, 1, reason, tx.now_db]
    noted = tx.fetch(NOTE_RUN, values)
    if not noted or outcome is RunOutcome.SKIPPED:
        return None
    try:
        job = _job(row.name, row.columns, slot)
        other = row.last_job_id or 0
        answer = _in_the_place_of(other, job) if reason else enqueue(tx, job)
    except (InvalidJob, QueueFull, IdempotencyConflict) as refusal:
        why = str(refusal)[:MAX_REASON_CHARS]
        tx.execute(NOTE_REFUSAL, [RunOutcome.REFUSED.value, why, noted[0][0]])
        return None
    tx.execute(NOTE_JOB, [answer.job_id, noted[0][0]])
    return answer.job_id


def _in_the_place_of(job_id: int, job: NewJob) -> Enqueued:
    """Cancel a job and enqueue another: both, or none if the queue refuses."""
    with transaction(rings=False) as savepoint:
        cancel(savepoint, [job_id])
        return enqueue(savepoint, job)


def _is_unfinished(tx: Transaction, job_id: int | None) -> bool:
    last = _last(tx, job_id)
    return last is not None and last[0] not in TERMINAL


def _lacks_its_task(tx: Transaction, row: _Row) -> bool:
    """Say whether the last job has died because no worker knows the task: each next one would, too.

    A death before the schedule was last changed does not count: the code has the task again.
    """
    last = _last(tx, row.last_job_id)
    if last is None or last[0] != State.DEAD or not last[1].startswith(UNKNOWN_TASK):
        return False
    return bool(tx.dialect.from_db(last[2]) > row.columns["updated_at"])


def _last(tx: Transaction, job_id: int | None) -> tuple[str, str, Any] | None:
    """Return the state, the last error and the end of the job of the slot before, if it is there."""
    rows = tx.fetch(READ_LAST, [job_id]) if job_id is not None else []
    return (rows[0][0], rows[0][1], rows[0][2]) if rows else None


def _job(
    name: str,
    columns: Mapping[str, Any],
    slot: datetime,
    *,
    jitter: bool = True,
    manual: bool = False,
) -> NewJob:
    """Return the job of a slot. Raises `InvalidJob` if the settings do not admit it any more."""
    backoff = partial(Backoff, columns["backoff_base_seconds"], columns["backoff_max_seconds"])
    delay = _delay(name, slot, columns["jitter_seconds"]) if jitter else timedelta(0)
    options = job_options(
        run_after=slot + delay if delay else None,
        backoff=backoff(columns["backoff_jitter"]),
        **{column: columns[column] for column in TERMS[:3] + TERMS[4:8]},
    )
    args, kwargs = payload_codec.decode(columns["payload"])
    return build_job(options, args, kwargs, key_of(name, slot, manual=manual))


def _delay(name: str, slot: datetime, jitter_seconds: float) -> timedelta:
    """Return how much later than its slot a job is due: the same for every worker, and up to the jitter."""
    if not jitter_seconds:
        return timedelta(0)
    digest = blake2b(f"{name}@{slot.isoformat()}".encode(), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    return timedelta(seconds=share * jitter_seconds)
