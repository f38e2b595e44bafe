"""Jobs shown as the framework's task results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, overload

from relay_queue import conf, payload, validation
from relay_queue.compat import (
    AnyResult,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
)
from relay_queue.exceptions import Cancelled, Lost, PayloadError, TimedOut, UnknownTask
from relay_queue.states import UNCHARGED, Outcome, State
from relay_queue.store.records import Enqueued
from relay_queue.task import Call, as_enqueued

if TYPE_CHECKING:
    from relay_queue.models import Job, Lease

STATUSES: Final[dict[str, TaskResultStatus]] = {
    State.SCHEDULED: TaskResultStatus.READY,
    State.READY: TaskResultStatus.READY,
    State.RETRYING: TaskResultStatus.READY,
    State.RUNNING: TaskResultStatus.RUNNING,
    State.SUCCEEDED: TaskResultStatus.SUCCESSFUL,
    State.DEAD: TaskResultStatus.FAILED,
    State.CANCELLED: TaskResultStatus.FAILED,
}

MOST_ATTEMPTS: Final = 100
"""Attempts that a result tells of, the newest ones: a job may have a hundred thousand."""

OF_CALLS: Final = ("idempotency_key", "run_after")
"""What a call may say besides its arguments, of what the table keeps."""

MOST_LEASES: Final = 1000
"""Leases among which they are looked for: those that were not charged are passed over."""

# The outcomes that are errors, with the exception that stands for those that no function raised.
_ERRORS: Final[dict[str | None, type[BaseException]]] = {
    Outcome.FAILED: Exception,
    Outcome.FATAL: Exception,
    Outcome.TIMED_OUT: TimedOut,
    Outcome.EXPIRED: Lost,
    Outcome.LOST: Lost,
}


def new_result(call: Call, alias: str) -> AnyResult:
    """Return the result of a job that is not in the table yet: its id is empty until it is."""
    task, args, kwargs = call
    return TaskResult(
        task=task,
        id="",
        status=TaskResultStatus.READY,
        enqueued_at=None,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=list(args),
        kwargs=dict(kwargs),
        backend=alias,
        errors=[],
        worker_ids=[],
    )


def note_enqueued(result: AnyResult, enqueued: Enqueued) -> None:
    """Give a new result what the table knows of its job now."""
    if enqueued.created:
        complete(result, id=str(enqueued.job_id), enqueued_at=enqueued.created_at)
        return
    found = stored_result(str(enqueued.job_id))  # of an earlier call with the same key
    complete(result, **{item.name: getattr(found, item.name) for item in fields(found)})


def complete(result: AnyResult, **values: Any) -> None:
    """Fill fields of a result in: the framework's class is frozen, and refreshes itself so, too."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def stored_result(result_id: str) -> AnyResult:
    """Read a job and its attempts. Raises ``TaskResultDoesNotExist`` or ``TaskResultMismatch``.

    ``worker_ids`` has the worker of each charged attempt, and ``errors`` an error for each that
    failed. Of a long ledger only the newest attempts are read, at most ``MOST_ATTEMPTS``. The
    workers of older ones are empty texts, so that ``attempts`` is right, and their errors are left
    out. A cancelled job has one more, the last, which says so. A job that failed without any
    attempt has one, too.
    """
    # Models need loaded apps, and tasks may be imported before that.
    from relay_queue.models import Job

    job_id = validation.parse_id(str(result_id)) or 0  # a project may well keep it as a number
    rows = Job.objects.using(conf.get().database).filter(pk=job_id)
    job = rows.first() if validation.is_id(job_id) else None
    if job is None:
        raise TaskResultDoesNotExist(result_id)
    try:
        newest = list(job.leases.select_related("worker").order_by("-id")[:MOST_ATTEMPTS])
        options = {name: value for name in OF_CALLS if (value := getattr(job, name)) is not None}
        task = as_enqueued(job.task, job.backend, job.queue, job.priority, **options)
        args, kwargs = payload.decode(job.payload)
    except (UnknownTask, PayloadError) as error:
        raise TaskResultMismatch(f"job {job.pk} cannot be shown as a result: {error}") from error
    leases = _charged(job, newest)
    result = new_result((task, args, kwargs), job.backend)
    complete(
        result,
        id=str(job.pk),
        status=STATUSES[job.state],
        enqueued_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        last_attempted_at=newest[0].acquired_at if newest else None,
        errors=_errors(job, leases),
        worker_ids=[""] * (job.attempt - len(leases)) + [_worker(lease) for lease in leases],
        _return_value=None if job.result is None else json.loads(job.result),
    )
    return result


class EnqueuedResults(Sequence[AnyResult]):
    """The results of many enqueues, each made when it is looked at.

    Tens of thousands of results would cost more than the jobs. ``ids`` has the ids of all of them;
    they are empty as long as the jobs wait for a commit, see `relay_queue.backend.RelayBackend`.
    """

    def __init__(
        self, alias: str, calls: Sequence[Call], enqueued: Sequence[Enqueued] = ()
    ) -> None:
        self._alias = alias
        self._calls = calls
        self._enqueued = enqueued
        self._stored = False

    @property
    def ids(self) -> list[str]:
        """The ids of the results, in order."""
        if not self._enqueued:
            return [""] * len(self)
        return [str(entry.job_id) for entry in self._enqueued]

    def note_enqueued(self, enqueued: Sequence[Enqueued]) -> None:
        """Take the answers of the store; for the backend."""
        self._enqueued = enqueued

    def refresh(self) -> None:
        """Read results from the table from now on, each when it is looked at."""
        self._stored = True

    def __len__(self) -> int:
        return len(self._calls)

    @overload
    def __getitem__(self, index: int) -> AnyResult: ...
    @overload
    def __getitem__(self, index: slice) -> EnqueuedResults: ...
    def __getitem__(self, index: int | slice) -> AnyResult | EnqueuedResults:
        if isinstance(index, slice):
            part = EnqueuedResults(self._alias, self._calls[index], self._enqueued[index])
            part._stored = self._stored
            return part
        result = new_result(self._calls[index], self._alias)
        if self._enqueued:
            entry = self._enqueued[index]
            note_enqueued(result, entry._replace(created=entry.created and not self._stored))
        return result


def _charged(job: Job, newest: Sequence[Lease]) -> list[Lease]:
    """Return the newest charged attempts, oldest first. Snoozed ones may be many and tell nothing.

    ``newest`` are the newest leases of any outcome. Only where these are not all, and some of them
    are not charged, the table is read again.
    """
    charged = [lease for lease in newest if lease.outcome not in UNCHARGED]
    if len(charged) == len(newest) or len(newest) < MOST_ATTEMPTS:
        return charged[::-1]
    window = job.leases.order_by("-id").values("id")[:MOST_LEASES]
    found = job.leases.filter(id__in=window).exclude(outcome__in=UNCHARGED)
    return list(found.select_related("worker").order_by("-id")[:MOST_ATTEMPTS])[::-1]


def _errors(job: Job, leases: Sequence[Lease]) -> list[TaskError]:
    errors = [
        TaskError(
            exception_class_path=lease.error or _path(_ERRORS[lease.outcome]),
            traceback=lease.traceback or f"attempt {lease.attempt}: {lease.get_outcome_display()}",
        )
        for lease in leases
        if lease.outcome in _ERRORS
    ]
    if job.state == State.CANCELLED or (
        STATUSES[job.state] is TaskResultStatus.FAILED and not errors
    ):
        failed = "attempts of it failed before" if errors else "no attempt of it failed"
        reason = (not errors and job.last_error) or f"the job is {job.state}; {failed}"
        errors.append(TaskError(exception_class_path=_path(Cancelled), traceback=reason))
    return errors


def _path(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _worker(lease: Lease) -> str:
    """Return the incarnation of a lease's worker; empty if its row is gone."""
    return lease.worker.incarnation if lease.worker else ""
