"""What a program may do to jobs and queues. Everything here can be imported from ``relay_queue``.

Each function opens a transaction on the queue's database, or joins the caller's, and wakes workers
when that is committed. Each has a form for coroutines whose name begins with ``a``. A job is named
by its id, by the result of its enqueue, or by what `get_job` returned.

A function on one job raises `JobNotFound`, or `InvalidTransition` if the job is in a state to which
it does not apply. A function on many, ``…_many``, works in transactions of at most 1,000 jobs. It
returns a `Changed`, which says what was changed, skipped and not found. Inside the caller's
``atomic()`` all of it is part of that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.transaction import TransactionManagementError

from relay_queue import conf, operations, store, validation
from relay_queue.backoff import MAX_DELAY_SECONDS
from relay_queue.compat import AnyResult, TaskResult, task_backends
from relay_queue.exceptions import ConfigurationError, InvalidJob, JobNotFound, WaitTimeout, shown
from relay_queue.operations import JobOperation
from relay_queue.results import EnqueuedResults, stored_result
from relay_queue.states import TERMINAL, State
from relay_queue.store import Changed
from relay_queue.task import Call, require_calls

P = ParamSpec("P")
R = TypeVar("R")

FIRST_PAUSE_SECONDS: Final = 0.01
"""The first pause between two looks at a job that is waited for; each is half as long again."""

MAX_PAUSE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as it was when it was looked at. Times are aware UTC.

    ``task`` is the dotted path of the task. ``attempt`` counts the charged attempts, of which the
    job has ``max_attempts`` since it was enqueued or requeued. ``available_at`` is when it was due
    or will be. ``started_at`` is None before its first attempt, and ``finished_at`` until it has
    ended. ``last_error`` is one line, empty if no attempt has failed.
    """

    id: int
    queue: str
    task: str
    state: State
    priority: int
    attempt: int
    max_attempts: int
    idempotency_key: str | None
    created_at: datetime
    available_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    last_error: str

    @property
    def is_finished(self) -> bool:
        """Whether it succeeded, went dead or was cancelled."""
        return self.state in TERMINAL


AnyJob = int | str | AnyResult | JobInfo
"""How a job can be named: by its id, the result of its enqueue, or what `get_job` returned."""


class Keep(Enum):
    """Stands for a limit that is left as it is, since None is no limit."""

    KEEP = "KEEP"

    def __repr__(self) -> str:
        return self.name


KEEP: Final = Keep.KEEP


def enqueue_many(calls: Iterable[Call]) -> EnqueuedResults:
    """Enqueue many calls, ``task.bind(…)`` each, in one transaction: all or none.

    Returns their results in order, each made when it is looked at; ``.ids`` has all ids. It sends no
    signals and never waits for room. The tasks must belong to one alias of ``TASKS``. Raises
    `InvalidJob` with its children, `QueueFull` and `IdempotencyConflict`, and ``TypeError`` for what
    is no call; nothing is written then.
    """
    taken = require_calls(calls)
    aliases = sorted({task.backend for task, _args, _kwargs in taken})
    if not taken:
        return EnqueuedResults("", [])
    if len(aliases) > 1:
        raise InvalidJob(
            f"the calls belong to the aliases {', '.join(map(repr, aliases))} of TASKS; "
            "enqueue those of each alias on their own"
        )
    backend = task_backends[aliases[0]]
    enqueue = getattr(backend, "enqueue_many", None)
    if enqueue is None:
        raise ConfigurationError(
            f"TASKS[{aliases[0]!r}] is a {type(backend).__name__}, which enqueues one by one. Use "
            "relay_queue.backend.RelayBackend, or call enqueue() of each task."
        )
    results: EnqueuedResults = enqueue(taken)
    return results


def get_job(job: AnyJob) -> JobInfo:
    """Look at a job. Raises `JobNotFound`."""
    values = _read(job, *(item.name for item in fields(JobInfo)))
    return JobInfo(**{**values, "state": State(values["state"])})


def cancel(job: AnyJob) -> None:
    """Cancel an unfinished job at once.

    If it runs, its function is asked to stop, and a late result is refused.
    """
    _change(operations.CANCEL, job)


def cancel_many(jobs: Iterable[AnyJob]) -> Changed:
    """Cancel those of the jobs that are unfinished; see `cancel`."""
    return _change_many(operations.CANCEL, jobs)


def requeue(job: AnyJob) -> None:
    """Make a dead or cancelled job ready with a fresh budget of attempts. Raises `QueueFull`, too."""
    _change(operations.REQUEUE, job)


def requeue_many(jobs: Iterable[AnyJob]) -> Changed:
    """Requeue those of the jobs that are dead or cancelled; see `requeue`.

    Raises `QueueFull` if there is no room for the jobs of one transaction. Those of earlier ones
    stay requeued, so it can be called again with the same jobs when there is room.
    """
    return _change_many(operations.REQUEUE, jobs)


def run_now(job: AnyJob) -> None:
    """Make a scheduled or retrying job ready before its time; its budget stays as it is."""
    _change(operations.RUN_NOW, job)


def run_now_many(jobs: Iterable[AnyJob]) -> Changed:
    """Make those of the jobs ready that are scheduled or retrying; see `run_now`."""
    return _change_many(operations.RUN_NOW, jobs)


def discard(job: AnyJob) -> None:
    """Delete a dead job for good, with the record of every attempt."""
    _change(operations.DISCARD, job)


def discard_many(jobs: Iterable[AnyJob]) -> Changed:
    """Delete those of the jobs that are dead; see `discard`."""
    return _change_many(operations.DISCARD, jobs)


def release(job: AnyJob) -> None:
    """Take a running job from its worker and make it ready, uncharged.

    Its function is asked to stop, but may go on for a while: the next attempt can overlap with it.
    """
    _change(operations.RELEASE, job)


def release_many(jobs: Iterable[AnyJob]) -> Changed:
    """Release those of the jobs that run; see `release`."""
    return _change_many(operations.RELEASE, jobs)


def set_priority(job: AnyJob, priority: int) -> None:
    """Change the priority, −100 to 100, of a job that waits. The time that it waited goes on counting.

    Raises `InvalidJob` for a priority out of bounds.
    """
    _change(operations.SET_PRIORITY, job, priority=priority)


def set_priority_many(jobs: Iterable[AnyJob], priority: int) -> Changed:
    """Change the priority of those of the jobs that wait; see `set_priority`."""
    return _change_many(operations.SET_PRIORITY, jobs, priority=priority)


def pause(queue: str) -> bool:
    """Stop claims from a queue; what runs goes on, and enqueues are accepted. False if it was paused.

    A queue that is not there yet is made. Raises `InvalidJob` for a name that no queue can have, and
    `UnknownQueue` if ``RELAY["QUEUES"]`` lists others.
    """
    return store.in_transaction(lambda tx: store.pause(tx, queue))


def resume(queue: str) -> bool:
    """Allow claims from a queue again. False if they were allowed. Raises like `pause`."""
    return store.in_transaction(lambda tx: store.resume(tx, queue))


def delete_queue(queue: str) -> bool:
    """Delete a queue that has no job, with its limits and its pause. False if there is none.

    The next enqueue makes it again. On a server nobody else can use a queue until this is committed: do
    not call it inside of a long ``atomic()``. Raises `QueueInUse` if it has jobs, finished ones included, and
    ``OperationalError`` if another transaction uses queues for long.
    """
    return store.in_transaction(lambda tx: store.delete_queue(tx, queue))


def set_limits(
    queue: str, *, capacity: int | Keep | None = KEEP, max_running: int | Keep | None = KEEP
) -> None:
    """Set how many unfinished jobs a queue admits, and how many of its jobs run at once; None is no limit.

    A limit that is not named stays as it is, and so do jobs that are there. Raises ``TypeError`` if
    none is named, `InvalidJob` for a limit out of bounds, and otherwise like `pause`.
    """
    limits = {"capacity": capacity, "max_running": max_running}
    given = {name: value for name, value in limits.items() if not isinstance(value, Keep)}
    store.in_transaction(lambda tx: store.set_limits(tx, queue, **given))


def wait_for(job: AnyJob, timeout_seconds: float) -> AnyResult:
    """Wait until a job has finished, and return its result as it is then.

    A result that was given is refreshed and returned. Looks at the job with growing pauses, at most
    a second each. Raises `WaitTimeout` when the time is over, and `JobNotFound`. Inside
    ``atomic()`` it does not wait: a job that has not finished raises ``TransactionManagementError``
    there. The caller would hold what the job needs, or wait for a job that is not committed.
    """
    wait = _Wait(job, timeout_seconds)
    while not wait.is_over():
        time.sleep(wait.pause())  # no bell tells a caller of the end of a job
    return _refreshed(job)


async def await_for(job: AnyJob, timeout_seconds: float) -> AnyResult:
    """`wait_for` from a coroutine; no thread is kept while it waits."""
    wait = _Wait(job, timeout_seconds)
    while not await sync_to_async(wait.is_over)():
        await asyncio.sleep(wait.pause())
    return await sync_to_async(_refreshed)(job)


def _from_coroutines(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return the form of a function for coroutines, as Django has them: in the thread of sync code."""

    @wraps(function)
    async def form(*args: P.args, **kwargs: P.kwargs) -> R:
        return await sync_to_async(function, thread_sensitive=True)(*args, **kwargs)

    form.__name__ = form.__qualname__ = f"a{function.__name__}"
    form.__doc__ = f"`{function.__name__}` from a coroutine."
    return form


aenqueue_many = _from_coroutines(enqueue_many)
aget_job = _from_coroutines(get_job)
acancel = _from_coroutines(cancel)
acancel_many = _from_coroutines(cancel_many)
arequeue = _from_coroutines(requeue)
arequeue_many = _from_coroutines(requeue_many)
arun_now = _from_coroutines(run_now)
arun_now_many = _from_coroutines(run_now_many)
adiscard = _from_coroutines(discard)
adiscard_many = _from_coroutines(discard_many)
arelease = _from_coroutines(release)
arelease_many = _from_coroutines(release_many)
aset_priority = _from_coroutines(set_priority)
aset_priority_many = _from_coroutines(set_priority_many)
apause = _from_coroutines(pause)
aresume = _from_coroutines(resume)
aset_limits = _from_coroutines(set_limits)
adelete_queue = _from_coroutines(delete_queue)


def _change(operation: JobOperation, job: AnyJob, **given: int) -> None:
    job_id = _id_of(job)
    while not store.in_transaction(lambda tx: operation.change_one(tx, job_id, **given)):
        pass  # a job with a long ledger is deleted in several transactions


def _change_many(operation: JobOperation, jobs: Iterable[AnyJob], **given: int) -> Changed:
    if isinstance(jobs, str | bytes):
        # Its characters would be taken for ids of other jobs.
        raise TypeError(f"{jobs!r} is one job and not several; put it in a list")
    done = Changed()
    for changed in operation.change([_id_of(job) for job in jobs], **given):
        done.add(changed)
    return done


def _id_of(job: AnyJob) -> int:
    """Return a job's id. Raises ``TypeError`` for what is no job, `JobNotFound` for what is no id."""
    found: object = getattr(job, "id", job)
    if isinstance(found, str):
        if not found:
            raise JobNotFound(
                found,
                "its row is written when the transaction around its enqueue commits. Use the "
                "result after that",
            )
        if (job_id := validation.parse_id(found)) is None:
            raise JobNotFound(found, "ids of Relay's jobs are whole numbers")
        return job_id
    if isinstance(found, bool) or not isinstance(found, int):
        raise TypeError(
            f"{shown(job)} is a {type(job).__name__} and names no job; give the id of a job, or the "
            "result of its enqueue"
        )
    return int(found)


def _read(job: AnyJob, *names: str) -> dict[str, Any]:
    # Models need loaded apps, and this module may be imported before that.
    from relay_queue.models import Job

    job_id = _id_of(job)
    rows = Job.objects.using(conf.get().database).filter(pk=job_id)
    found: dict[str, Any] | None = rows.values(*names).first() if validation.is_id(job_id) else None
    if found is None:
        raise JobNotFound(job_id)
    return found


def _refreshed(job: AnyJob) -> AnyResult:
    if isinstance(job, TaskResult):
        job.refresh()
        return job
    return stored_result(str(_id_of(job)))


class _Wait:
    """One wait for a job: until when, and how long the next pause is. Sleeping is the caller's."""

    def __init__(self, job: AnyJob, timeout_seconds: float) -> None:
        validation.require_seconds("timeout_seconds", timeout_seconds, 0.0, MAX_DELAY_SECONDS)
        self._job_id = _id_of(job)
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._pause = FIRST_PAUSE_SECONDS

    def is_over(self) -> bool:
        """Look at the job. Raises if it is not there, not finished in time, or must not be waited for."""
        state = _read(self._job_id, "state")["state"]
        if state in TERMINAL:
            return True
        connection = connections[conf.get().database]
        if connection.in_atomic_block or not connection.get_autocommit():
            raise TransactionManagementError(
                f"job {self._job_id} is {state}, and a transaction is open on the queue's database. "
                "Wait after its commit: until then no worker may see the job, or write its outcome."
            )
        if time.monotonic() >= self._deadline:
            raise WaitTimeout(self._job_id, state, self._timeout_seconds)
        return False

    def pause(self) -> float:
        """Return the seconds until the next look, which is not later than the end of the wait."""
        pause, self._pause = self._pause, min(self._pause * 1.5, MAX_PAUSE_SECONDS)
        return max(0.0, min(pause, self._deadline - time.monotonic()))
