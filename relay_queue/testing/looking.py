"""Look at what was enqueued, and say what should have been."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections

from relay_queue import conf, store
from relay_queue.backend import WaitingInsert
from relay_queue.compat import AnyResult, AnyTask, normalize_json
from relay_queue.models import Job
from relay_queue.results import stored_result


def enqueued(task: AnyTask | None = None, *, queue: str | None = None) -> list[AnyResult]:
    """Return the jobs in the table, of every state, as results in the order of their enqueues.

    Warns of jobs that wait for a commit, and so are not among them.
    """
    warn_of_waiting(task, queue)
    return _results(task, queue, after=0)


@contextmanager
def capture_enqueued(
    task: AnyTask | None = None, *, queue: str | None = None
) -> Iterator[list[AnyResult]]:
    """Give a list that has, after the block, the results of what was enqueued inside of it.

    Warns of jobs that wait for a commit when the block ends, and so are not in the list.
    """
    jobs = Job.objects.using(conf.get().database)
    last = jobs.order_by("-id").values_list("id", flat=True).first() or 0
    captured: list[AnyResult] = []
    yield captured
    captured += _results(task, queue, after=last)
    warn_of_waiting(task, queue, stacklevel=4)  # behind contextlib's frame


def assert_enqueued(
    task: AnyTask,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    queue: str | None = None,
    count: int | None = None,
) -> list[AnyResult]:
    """Fail unless the task was enqueued, and return the results of the jobs that fit.

    ``args`` and ``kwargs`` are compared as the JSON that they are stored as; None fits everything.
    ``count`` is how many jobs must fit; by default at least one. Raises ``AssertionError`` with a
    list of what was enqueued.
    """
    fitting = [
        result
        for result in _results(task, queue, after=0)
        if args is None or result.args == normalize_json(list(args))
        if kwargs is None or result.kwargs == normalize_json(dict(kwargs))
    ]
    if len(fitting) == count or (count is None and fitting):
        return fitting
    wanted = "at least one job" if count is None else f"{count} jobs"
    asked = [f"args={args!r}"] if args is not None else []
    asked += [f"kwargs={kwargs!r}"] if kwargs is not None else []
    asked += [f"queue={queue!r}"] if queue is not None else []
    what = f"{task.module_path} with {', '.join(asked)}" if asked else task.module_path
    raise AssertionError(f"expected {wanted} of {what}, found {len(fitting)}. {_list_all()}")


def assert_not_enqueued(task: AnyTask | None = None, *, queue: str | None = None) -> None:
    """Fail if a job was enqueued, of this task or at all. Raises ``AssertionError``.

    A job that waits for a commit counts: with the commit it is enqueued.
    """
    found = [*_results(task, queue, after=0), *waiting_for_commit(task, queue)]
    if found:
        raise AssertionError(f"expected no job, found {len(found)}. {_list_all()}")


def _results(task: AnyTask | None, queue: str | None, after: int) -> list[AnyResult]:
    jobs = Job.objects.using(conf.get().database).filter(pk__gt=after)
    if task is not None:
        jobs = jobs.filter(task=task.module_path)
    if queue is not None:
        jobs = jobs.filter(queue=queue)
    return [stored_result(str(pk)) for pk in jobs.order_by("id").values_list("id", flat=True)]


def waiting_for_commit(task: AnyTask | None, queue: str | None) -> list[store.NewJob]:
    """Return the jobs that will be enqueued when the transaction of the caller's rows commits."""
    hooks = [
        hook for c in connections.all(initialized_only=True) for _, hook, *_ in c.run_on_commit
    ]
    return [
        job
        for hook in hooks
        if isinstance(hook, WaitingInsert) and not hook.done
        for job in hook.jobs
        if task is None or job.options.task == task.module_path
        if queue is None or job.options.queue == queue
    ]


def warn_of_waiting(task: AnyTask | None, queue: str | None, *, stacklevel: int = 3) -> None:
    """Warn at the caller's line if jobs wait for a commit, which in a ``TestCase`` never comes."""
    waiting = waiting_for_commit(task, queue)
    if waiting:
        warnings.warn(_said_of(waiting), stacklevel=stacklevel)


def _said_of(waiting: Sequence[store.NewJob]) -> str:
    lines = [f"\n- {job.options.task} {job.payload} in {job.options.queue}" for job in waiting]
    return (
        f"Jobs that wait for the commit of the test's transaction (enqueue_on_commit), which a "
        f"TestCase never makes:{''.join(lines)}\nPretend it: enqueue inside "
        "self.captureOnCommitCallbacks(execute=True), or use a TransactionTestCase."
    )


def _list_all() -> str:
    jobs = Job.objects.using(conf.get().database).order_by("id")
    lines = [f"\n- {job.task} {job.payload} in {job.queue} ({job.state})" for job in jobs]
    listed = f"Enqueued were:{''.join(lines)}" if lines else "Nothing was enqueued."
    waiting = waiting_for_commit(None, None)
    return f"{listed}\n{_said_of(waiting)}" if waiting else listed
