"""Enqueue: check a job, and insert it inside the caller's transaction where there is one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

from django.db import connections

from relay_queue import conf, validation
from relay_queue import payload as payload_codec
from relay_queue.backoff import MAX_DELAY_SECONDS, Backoff, Jitter
from relay_queue.exceptions import IdempotencyConflict, InvalidJob, QueueFull
from relay_queue.ranking import MAX_PRIORITY, MIN_PRIORITY, rank
from relay_queue.states import State
from relay_queue.store.dialects import Dialect, marks
from relay_queue.store.queues import QueueLimits, guessed_limits, queue_limits, queue_name
from relay_queue.store.records import Enqueued, JobOptions, NewJob
from relay_queue.store.transaction import Transaction, in_transaction
from relay_queue.store.transitions import moved

COLUMNS = (
    "queue",
    "backend",
    "task",
    "payload",
    "checksum",
    "idempotency_key",
    "priority",
    "rank",
    "state",
    "max_attempts",
    "lease_seconds",
    "timeout_seconds",
    "backoff_base_seconds",
    "backoff_max_seconds",
    "backoff_jitter",
    "available_at",
    "run_after",
    "created_at",
)

DEFAULTED = "attempt, attempt_base, losses, last_error"
"""Columns that begin at nothing; named because Django keeps defaults out of the table."""

INSERT_JOBS = f"""
    INSERT INTO relay_queue_job ({", ".join(COLUMNS)}, {DEFAULTED})
    VALUES ({marks(len(COLUMNS))}, 0, 0, 0, '')
    ON CONFLICT (queue, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
"""
"""Insert jobs, one by one in one call, but for those whose key another transaction just took."""

INSERT_JOB = f"{INSERT_JOBS} RETURNING id"
"""Insert one job."""

INSERT_IF_STILL = f"""
    INSERT INTO relay_queue_job ({", ".join(COLUMNS)}, {DEFAULTED})
    SELECT {{row}}, 0, 0, 0, '' FROM relay_queue_queue
    WHERE name = %s AND capacity IS NULL AND COALESCE(aging_seconds, 0) = %s
    RETURNING id
"""
"""Insert one job if its queue is still unbounded and ages as it did: one statement, not two."""

COLUMN_CASTS = (
    *("text", "text", "text", "text", "bigint", "text", "smallint", "bigint", "text", "int"),
    *("float8", "float8", "float8", "float8", "text"),
    *("timestamptz", "timestamptz", "timestamptz"),
)

FIND_KEYS = """
    SELECT idempotency_key, id, task, payload, state, created_at FROM relay_queue_job
    WHERE queue = %s AND idempotency_key IN ({keys})
"""
"""Find the jobs that hold idempotency keys."""

WAIT_STEP_SECONDS = 0.05
"""First pause between two looks for room; doubles to one second."""

KEY_BATCH = 500
"""Keys looked up in one statement: below the parameter limit of every database."""

_leads_to_same: Callable[[str, str, str], bool] | None = None

_Place = tuple[State, tuple[Any, ...]]
"""A job's first state, and the last columns of its row."""

_Holder = tuple[int, str, str, str, Any]

_Fresh = tuple[int, NewJob, _Place]
"""A job of a batch that needs a row: its place in the batch, itself, and its place in the queue."""


def tasks_are_named_by(leads_to_same: Callable[[str, str, str], bool]) -> None:
    """Set what says whether two stored paths lead to one task: the paths, and a backend's alias.

    A task that was moved keeps the jobs of its old path, and a call under the new one is the same
    call. Tasks stand above the store, which therefore does not import them.
    """
    global _leads_to_same  # noqa: PLW0603 - set once for each process, when tasks are imported
    _leads_to_same = leads_to_same


def job_options(
    *,
    task: str,
    queue: str = "default",
    backend: str = "default",
    priority: int = 0,
    run_after: datetime | None = None,
    max_attempts: int | None = None,
    lease_seconds: float | None = None,
    timeout_seconds: float | None = None,
    backoff: Backoff | None = None,
) -> JobOptions:
    """Return the checked options of a task's jobs; None stands for the project's default.

    Raises `InvalidJob`, or its child `UnknownQueue`.
    """
    settings = conf.get()
    if backoff is not None and not isinstance(backoff, Backoff):
        raise InvalidJob(f"backoff must be a Backoff, not {type(backoff).__name__}")
    return JobOptions(
        queue=queue_name(queue),
        backend=validation.require_text("backend", backend, 100),
        task=validation.require_text("task", task, 255),
        priority=validation.require_int("priority", priority, MIN_PRIORITY, MAX_PRIORITY),
        run_after=None
        if run_after is None
        else validation.require_run_after(run_after, settings.max_defer_seconds),
        max_attempts=settings.max_attempts
        if max_attempts is None
        else validation.require_int("max_attempts", max_attempts, 1, settings.max_attempts_limit),
        lease_seconds=_lease_seconds(lease_seconds, settings),
        timeout_seconds=settings.timeout_seconds
        if timeout_seconds is None
        else validation.require_seconds(
            "timeout_seconds", timeout_seconds, 0.001, MAX_DELAY_SECONDS
        ),
        backoff=backoff or _default_backoff(settings),
    )


def build_job(
    options: JobOptions,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
) -> NewJob:
    """Return a job that calls a task with these options. Raises `PayloadError` or `InvalidJob`."""
    settings = conf.get()
    kwargs = {} if kwargs is None else kwargs
    validation.require_arguments(args, kwargs)
    text = payload_codec.encode(
        args, kwargs, max_bytes=settings.max_payload_bytes, max_depth=settings.max_payload_depth
    )
    idempotency_key = validation.require_idempotency_key(idempotency_key)
    signed = payload_codec.checksum(
        options.queue, options.backend, options.task, text, idempotency_key
    )
    return NewJob(options, text, signed, idempotency_key)


def new_job(
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
    **options: Any,
) -> NewJob:
    """Return one checked job: `job_options` of ``options``, and `build_job` on them."""
    return build_job(job_options(**options), args, kwargs, idempotency_key)


def _lease_seconds(lease_seconds: float | None, settings: conf.RelaySettings) -> float:
    if lease_seconds is None:
        return settings.lease_seconds
    low, high = settings.min_lease_seconds, settings.max_lease_seconds
    return validation.require_seconds("lease_seconds", lease_seconds, low, high)


def _default_backoff(settings: conf.RelaySettings) -> Backoff:
    jitter = cast(Jitter, settings.backoff_jitter)
    return Backoff(settings.backoff_base_seconds, settings.backoff_max_seconds, jitter)


def enqueue(tx: Transaction, job: NewJob) -> Enqueued:
    """Insert one job; or, if its idempotency key is taken by the same call, return that job.

    Raises `QueueFull`, `IdempotencyConflict` or `UnknownQueue`; nothing is written then.
    """
    queue, key = job.options.queue, job.idempotency_key
    guess = guessed_limits(tx, queue) if key is None else None
    if guess is not None:
        guards = (queue, guess.aging_seconds or 0)
        inserted = insert_one(tx, job, guess, _insert_if_still(tx.dialect), *guards)
        if inserted is not None:
            return inserted
    limits = queue_limits(tx, queue)
    if key is not None:
        found = _holders(tx, queue, [key])
        if found:
            return _same_call(job, found[key])
    _admit(queue, limits, 1)
    inserted = insert_one(tx, job, limits, INSERT_JOB)
    return _taken_meanwhile(tx, job) if inserted is None else inserted


def enqueue_many(tx: Transaction, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Insert many jobs with a few statements; the answers are in the order of the jobs.

    All or nothing: a `QueueFull` or an `IdempotencyConflict` refuses the whole batch. Two jobs of
    the batch with one key and the same call become one job.
    """
    answers: dict[int, Enqueued] = {}
    twins: dict[int, int] = {}
    fresh: list[_Fresh] = []
    groups: dict[str, list[tuple[int, NewJob]]] = defaultdict(list)
    for entry in enumerate(jobs):
        groups[entry[1].options.queue].append(entry)
    # In name order: two batches that meet on the limits of two queues must not wait crosswise.
    for queue in sorted(groups):
        limits = queue_limits(tx, queue)
        new = _new_of_queue(tx, queue, groups[queue], answers, twins)
        _admit(queue, limits, len(new))
        places: dict[int, _Place] = {}
        for index, job in new:
            place = places.get(id(job.options)) or places.setdefault(
                id(job.options), _place(tx, job.options, limits)
            )
            fresh.append((index, job, place))
    _insert(tx, _in_one_order(fresh) if tx.dialect.lock_rows else fresh, answers)
    for index, first in twins.items():
        answers[index] = answers[first]._replace(created=False)
    return [answers[index] for index in range(len(jobs))]


def enqueue_waiting(job: NewJob, wait_seconds: float) -> Enqueued:
    """Enqueue one job in a transaction of its own, waiting up to ``wait_seconds`` for room.

    Inside ``atomic()`` it does not wait: no room can appear while the caller holds the writer.
    Raises `QueueFull` when the time is over.
    """
    validation.require_seconds("wait_seconds", wait_seconds, 0.0, MAX_DELAY_SECONDS)
    deadline = time.monotonic() + wait_seconds
    pause = WAIT_STEP_SECONDS
    while True:
        try:
            return in_transaction(lambda tx: enqueue(tx, job))
        except QueueFull:
            left = deadline - time.monotonic()
            if left <= 0 or connections[conf.get().database].in_atomic_block:
                raise
        time.sleep(min(pause, left))
        pause = min(pause * 2, 1.0)


def insert_one(
    tx: Transaction, job: NewJob, limits: QueueLimits, statement: str, *guards: Any
) -> Enqueued | None:
    """Insert one job; None if a guard of the statement did not hold."""
    state, tail = _place(tx, job.options, limits)
    rows = tx.fetch(statement, (*_row(job, tail), *guards))
    if not rows:
        return None
    moved(tx, [(rows[0][0], job.options.queue)], None, state)
    tx.wake()
    return Enqueued(rows[0][0], True, state, tx.now)


@lru_cache(maxsize=8)
def _insert_if_still(dialect: Dialect) -> str:
    return INSERT_IF_STILL.format(row=dialect.row(COLUMN_CASTS))


def _admit(queue: str, limits: QueueLimits, wanted: int) -> None:
    if limits.capacity is not None and wanted and limits.unfinished + wanted > limits.capacity:
        raise QueueFull(queue, limits.capacity, wanted)


def _place(tx: Transaction, options: JobOptions, limits: QueueLimits) -> _Place:
    """Return what the rows of all jobs on these options have in common, from priority on."""
    deferred = options.run_after is not None and options.run_after > tx.now
    # A time in the past counts as now: an old date must not buy a place ahead of those who wait.
    available_at = options.run_after if deferred and options.run_after else tx.now
    state = State.SCHEDULED if deferred else State.READY
    return state, (
        options.priority,
        rank(available_at, options.priority, limits.aging_seconds),
        state.value,
        options.max_attempts,
        options.lease_seconds,
        options.timeout_seconds,
        options.backoff.base_seconds,
        options.backoff.max_seconds,
        options.backoff.jitter,
        tx.dialect.to_db(available_at) if deferred else tx.now_db,
        None if options.run_after is None else tx.dialect.to_db(options.run_after),
        tx.now_db,
    )


def _row(job: NewJob, tail: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a job's values in the order of ``COLUMNS``."""
    options = job.options
    head = (options.queue, options.backend, options.task, job.payload, job.checksum)
    return (*head, job.idempotency_key, *tail)


def _holders(tx: Transaction, queue: str, keys: Sequence[str]) -> dict[str, _Holder]:
    """Return for each taken key: job id, task, payload, state, created_at."""
    found: dict[str, _Holder] = {}
    for start in range(0, len(keys), KEY_BATCH):
        batch = keys[start : start + KEY_BATCH]
        statement = FIND_KEYS.format(keys=marks(len(batch)))
        for key, *holder in tx.fetch(statement, [queue, *batch]):
            holder[-1] = tx.dialect.from_db(holder[-1])
            found[key] = tuple(holder)
    return found


def _same_call(job: NewJob, holder: _Holder) -> Enqueued:
    job_id, task, payload, state, created_at = holder
    if not _is_same(job, task, payload):
        raise IdempotencyConflict(job.options.queue, str(job.idempotency_key), job_id)
    return Enqueued(job_id, False, state, created_at)


def _is_same(job: NewJob, task: str, payload: str) -> bool:
    """Say whether a job is the call of this task with this payload."""
    if payload != job.payload:
        return False
    wanted, backend = job.options.task, job.options.backend
    return task == wanted or bool(_leads_to_same and _leads_to_same(task, wanted, backend))


def _taken_meanwhile(tx: Transaction, job: NewJob) -> Enqueued:
    """Return the job whose key was free when we looked and taken when we inserted."""
    key = str(job.idempotency_key)
    holder = _holders(tx, job.options.queue, [key]).get(key)
    return enqueue(tx, job) if holder is None else _same_call(job, holder)


def _new_of_queue(
    tx: Transaction,
    queue: str,
    jobs: Sequence[tuple[int, NewJob]],
    answers: dict[int, Enqueued],
    twins: dict[int, int],
) -> list[tuple[int, NewJob]]:
    """Return the jobs that need a row; answer those whose key is taken, note twins in the batch."""
    if all(job.idempotency_key is None for _, job in jobs):
        return list(jobs)
    holders = _holders(tx, queue, [j.idempotency_key for _, j in jobs if j.idempotency_key])
    new: list[tuple[int, NewJob]] = []
    firsts: dict[str, tuple[int, NewJob]] = {}
    for index, job in jobs:
        key = job.idempotency_key
        if key is None:
            new.append((index, job))
        elif key in holders:
            answers[index] = _same_call(job, holders[key])
        elif key in firsts:
            first_index, first = firsts[key]
            if not _is_same(job, first.options.task, first.payload):
                raise IdempotencyConflict(queue, key)
            twins[index] = first_index
        else:
            firsts[key] = (index, job)
            new.append((index, job))
    return new


def _in_one_order(fresh: Sequence[_Fresh]) -> Sequence[_Fresh]:
    """Sort rows by queue and key, as every batch does that may run beside this one.

    An insert waits for another transaction that has inserted the same key. Two batches with their
    keys in different orders would wait crosswise, and the server would undo one of them. Ids then
    follow the keys, so the order of the calls goes into the ranks: each a microsecond behind the
    one before.
    """
    if not any(job.idempotency_key for _, job, _ in fresh):
        return fresh
    ranked = [
        (index, job, (state, (priority, rank + index, *rest)))
        for index, job, (state, (priority, rank, *rest)) in fresh
    ]
    return sorted(ranked, key=lambda row: (row[1].options.queue, row[1].idempotency_key or ""))


def _insert(tx: Transaction, fresh: Sequence[_Fresh], answers: dict[int, Enqueued]) -> None:
    rows = (_row(job, place[1]) for _, job, place in fresh)
    ids = tx.insert_many(INSERT_JOBS, rows, len(fresh))
    now = tx.now
    added: defaultdict[State, list[tuple[int, str]]] = defaultdict(list)
    for (index, job, (state, _tail)), job_id in zip(fresh, ids, strict=True):
        if job_id is None:
            answers[index] = _taken_meanwhile(tx, job)
            continue
        answers[index] = Enqueued(job_id, True, state, now)
        added[state].append((job_id, job.options.queue))
    for state, inserted in added.items():
        moved(tx, inserted, None, state)
    if added:
        tx.wake()
