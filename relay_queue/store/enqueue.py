"""Enqueue: put jobs into the table, inside the caller's transaction where there is one."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import connections

from relay_queue import conf
from relay_queue import payload as payload_codec
from relay_queue.backoff import MAX_DELAY_SECONDS, Backoff
from relay_queue.exceptions import IdempotencyConflict, InvalidJob, QueueFull
from relay_queue.ranking import MAX_PRIORITY, MIN_PRIORITY, rank
from relay_queue.states import State
from relay_queue.store import bounds
from relay_queue.store.queues import QueueLimits, queue_limits, queue_name
from relay_queue.store.records import Enqueued, NewJob
from relay_queue.store.transaction import Transaction, transaction

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
    "created_at",
)
DEFAULTED = "attempt, attempt_base, losses, last_error"
"""Columns that begin at nothing; named because Django keeps defaults out of the table."""

INSERT_JOB = f"""
    INSERT INTO relay_queue_job ({", ".join(COLUMNS)}, {DEFAULTED})
    VALUES ({", ".join(["%s"] * len(COLUMNS))}, 0, 0, 0, '')
    RETURNING id
"""
"""Insert one job."""

FIND_KEYS = """
    SELECT idempotency_key, id, task, payload, state, created_at FROM relay_queue_job
    WHERE queue = %s AND idempotency_key IN ({keys})
"""
"""Find the jobs that hold idempotency keys."""

WAIT_STEP_SECONDS = 0.05
"""First pause between two looks for room; doubles to one second."""

KEY_BATCH = 500
"""Keys looked up in one statement: below the parameter limit of every database."""


def prepare(
    *,
    task: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    queue: str = "default",
    backend: str = "default",
    priority: int = 0,
    run_after: datetime | None = None,
    idempotency_key: str | None = None,
    max_attempts: int | None = None,
    lease_seconds: float | None = None,
    timeout_seconds: float | None = None,
    backoff: Backoff | None = None,
) -> NewJob:
    """Check a job against every limit and return it ready to be enqueued. Touches no database.

    None stands for the project's default. Raises `InvalidJob`, or its children `PayloadError` and
    `UnknownQueue`.
    """
    settings = conf.get()
    kwargs = {} if kwargs is None else kwargs
    bounds.call(args, kwargs)
    text = payload_codec.encode(
        args, kwargs, max_bytes=settings.max_payload_bytes, max_depth=settings.max_payload_depth
    )
    task = bounds.text("task", task, 255)
    backend = bounds.text("backend", backend, 100)
    queue = queue_name(queue)
    if idempotency_key is not None:
        idempotency_key = bounds.text("idempotency_key", idempotency_key, 255)
    if backoff is not None and not isinstance(backoff, Backoff):
        raise InvalidJob(f"backoff must be a Backoff, not {type(backoff).__name__}")
    return NewJob(
        queue=queue,
        backend=backend,
        task=task,
        payload=text,
        checksum=payload_codec.checksum(queue, backend, task, text, idempotency_key),
        priority=bounds.whole("priority", priority, MIN_PRIORITY, MAX_PRIORITY),
        run_after=None
        if run_after is None
        else bounds.run_after(run_after, settings.max_defer_seconds),
        idempotency_key=idempotency_key,
        max_attempts=settings.max_attempts
        if max_attempts is None
        else bounds.whole("max_attempts", max_attempts, 1, settings.max_attempts_limit),
        lease_seconds=lease_length(lease_seconds),
        timeout_seconds=settings.timeout_seconds
        if timeout_seconds is None
        else bounds.seconds("timeout_seconds", timeout_seconds, 0.001, MAX_DELAY_SECONDS),
        backoff=backoff or _default_backoff(settings),
    )


def lease_length(lease_seconds: float | None) -> float:
    """Return the length of a lease, the project's own for None; raises `InvalidJob`."""
    settings = conf.get()
    if lease_seconds is None:
        return settings.lease_seconds
    low, high = settings.min_lease_seconds, settings.max_lease_seconds
    return bounds.seconds("lease_seconds", lease_seconds, low, high)


def _default_backoff(settings: conf.RelaySettings) -> Backoff:
    return Backoff(
        settings.backoff_base_seconds, settings.backoff_max_seconds, settings.backoff_jitter
    )


def enqueue(tx: Transaction, job: NewJob) -> Enqueued:
    """Insert one job; or, if its idempotency key is taken by the same call, return that job.

    Raises `QueueFull`, `IdempotencyConflict` or `UnknownQueue`; nothing is written then.
    """
    limits = queue_limits(tx, job.queue)
    if job.idempotency_key is not None:
        found = _holders(tx, job.queue, [job.idempotency_key])
        if found:
            return _same_call(job, found[job.idempotency_key])
    _admit(job.queue, limits, 1)
    state, values = _row(tx, job, limits)
    ((job_id,),) = tx.fetch(INSERT_JOB, values)
    tx.count(job.queue, state, 1)
    return Enqueued(job_id, True, state, tx.now)


def enqueue_many(tx: Transaction, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Insert many jobs with a few statements; the answers are in the order of the jobs.

    All or nothing: a `QueueFull` or an `IdempotencyConflict` refuses the whole batch. Two jobs of
    the batch with one key and the same call become one job.
    """
    answers: dict[int, Enqueued] = {}
    groups: dict[str, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        groups[job.queue].append(index)
    # In name order: two batches that meet on the limits of two queues must not wait crosswise.
    fresh: list[tuple[int, NewJob, QueueLimits]] = []
    twins: dict[int, int] = {}
    for queue in sorted(groups):
        limits = queue_limits(tx, queue)
        new = _new_of_queue(tx, queue, [(i, jobs[i]) for i in groups[queue]], answers, twins)
        _admit(queue, limits, len(new))
        fresh += [(index, job, limits) for index, job in new]
    _insert(tx, fresh, answers)
    for index, first in twins.items():
        known = answers[first]
        answers[index] = Enqueued(known.job_id, False, known.state, known.created_at)
    return [answers[index] for index in range(len(jobs))]


def enqueue_waiting(job: NewJob, wait_seconds: float) -> Enqueued:
    """Enqueue one job in a transaction of its own, waiting up to ``wait_seconds`` for room.

    Inside ``atomic()`` it does not wait: no room can appear while the caller holds the writer.
    Raises `QueueFull` when the time is over.
    """
    bounds.seconds("wait_seconds", wait_seconds, 0.0, MAX_DELAY_SECONDS)
    deadline = time.monotonic() + wait_seconds
    pause = WAIT_STEP_SECONDS
    while True:
        try:
            with transaction() as tx:
                return enqueue(tx, job)
        except QueueFull:
            left = deadline - time.monotonic()
            if left <= 0 or connections[conf.get().database].in_atomic_block:
                raise
        time.sleep(min(pause, left))
        pause = min(pause * 2, 1.0)


def _admit(queue: str, limits: QueueLimits, wanted: int) -> None:
    if limits.capacity is not None and wanted and limits.unfinished + wanted > limits.capacity:
        raise QueueFull(queue, limits.capacity, wanted)


def _row(tx: Transaction, job: NewJob, limits: QueueLimits) -> tuple[State, tuple[Any, ...]]:
    """Return a job's first state and its values in the order of ``COLUMNS``."""
    deferred = job.run_after is not None and job.run_after > tx.now
    # A time in the past counts as now: an old date must not buy a place ahead of those who wait.
    available_at = job.run_after if deferred and job.run_after else tx.now
    state = State.SCHEDULED if deferred else State.READY
    return state, (
        job.queue,
        job.backend,
        job.task,
        job.payload,
        job.checksum,
        job.idempotency_key,
        job.priority,
        rank(available_at, job.priority, limits.aging_seconds),
        state.value,
        job.max_attempts,
        job.lease_seconds,
        job.timeout_seconds,
        job.backoff.base_seconds,
        job.backoff.max_seconds,
        job.backoff.jitter,
        tx.dialect.to_db(available_at) if deferred else tx.now_db,
        tx.now_db,
    )


_Holder = tuple[int, str, str, str, Any]


def _holders(tx: Transaction, queue: str, keys: Sequence[str]) -> dict[str, _Holder]:
    """Return for each taken key: job id, task, payload, state, created_at."""
    found: dict[str, _Holder] = {}
    for start in range(0, len(keys), KEY_BATCH):
        batch = keys[start : start + KEY_BATCH]
        statement = FIND_KEYS.format(keys=", ".join(["%s"] * len(batch)))
        for key, *holder in tx.fetch(statement, [queue, *batch]):
            holder[-1] = tx.dialect.from_db(holder[-1])
            found[key] = tuple(holder)  # type: ignore[assignment]
    return found


def _same_call(job: NewJob, holder: _Holder) -> Enqueued:
    job_id, task, payload, state, created_at = holder
    if (task, payload) != (job.task, job.payload):
        raise IdempotencyConflict(job.queue, str(job.idempotency_key), job_id)
    return Enqueued(job_id, False, state, created_at)


def _new_of_queue(
    tx: Transaction,
    queue: str,
    jobs: Iterable[tuple[int, NewJob]],
    answers: dict[int, Enqueued],
    twins: dict[int, int],
) -> list[tuple[int, NewJob]]:
    """Return the jobs that need a row; answer those whose key is taken, note twins in the batch."""
    jobs = list(jobs)
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
            if (first.task, first.payload) != (job.task, job.payload):
                raise IdempotencyConflict(queue, key)
            twins[index] = first_index
        else:
            firsts[key] = (index, job)
            new.append((index, job))
    return new


INSERT_MANY = f"""
    INSERT INTO relay_queue_job ({", ".join(COLUMNS)}, {DEFAULTED})
    SELECT {{fields}}, 0, 0, 0, '' FROM {{source}} ORDER BY {{position}}
    RETURNING id
"""
"""Insert the rows of one JSON document; the ids come back ascending in the rows' order."""

INSERT_ROWS = 2_000
INSERT_CHARS = 4_000_000
"""Rows and characters of payload in one statement: they bound the JSON text held in memory."""


def _insert(
    tx: Transaction, fresh: list[tuple[int, NewJob, QueueLimits]], answers: dict[int, Enqueued]
) -> None:
    source, position, fields = tx.dialect.json_rows(len(COLUMNS))
    statement = INSERT_MANY.format(source=source, position=position, fields=fields)
    for batch in _batches(fresh):
        rows = [_row(tx, job, limits) for _, job, limits in batch]
        ids = tx.fetch(statement, [json.dumps([values for _, values in rows])])
        # Ids grow in the order of insertion, but RETURNING promises no order.
        for (index, job, _), (state, _values), (job_id,) in zip(
            batch, rows, sorted(ids), strict=True
        ):
            tx.count(job.queue, state, 1)
            answers[index] = Enqueued(job_id, True, state, tx.now)


_Fresh = tuple[int, NewJob, QueueLimits]


def _batches(fresh: Sequence[_Fresh]) -> Iterator[list[_Fresh]]:
    """Cut the jobs into batches of bounded rows and bounded text."""
    batch: list[_Fresh] = []
    chars = 0
    for entry in fresh:
        size = len(entry[1].payload)
        if batch and (len(batch) >= INSERT_ROWS or chars + size > INSERT_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append(entry)
        chars += size
    if batch:
        yield batch
