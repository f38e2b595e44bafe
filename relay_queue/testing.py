"""For the tests of projects that use Relay. No worker, no threads, the real store.

Everything works inside Django's ``TestCase``, whose transaction it joins, and with pytest-django's
``db``, on a database in memory too. Jobs that wait for the commit of another database, see
``enqueue_on_commit`` of `relay_queue.backend.RelayBackend`, are enqueued when it is pretended:
``with self.captureOnCommitCallbacks(execute=True)``. Until then the functions here warn of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from django.db import connections

from relay_queue import clock, conf, store
from relay_queue.backend import RelayBackend, WaitingInsert
from relay_queue.compat import AnyResult, AnyTask, normalize_json
from relay_queue.context import JobContext
from relay_queue.models import Job
from relay_queue.query import looks
from relay_queue.results import EnqueuedResults, stored_result
from relay_queue.states import State
from relay_queue.worker import outcome
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.executor import execute
from relay_queue.worker.threads import follow_threads, is_left_open

if TYPE_CHECKING:
    from unittest.mock import _patch

__all__ = [
    "assert_enqueued",
    "assert_not_enqueued",
    "capture_enqueued",
    "enqueued",
    "run_on_enqueue",
    "run_pending",
]

# -- what was enqueued, and what should have been


def enqueued(task: AnyTask | None = None, *, queue: str | None = None) -> list[AnyResult]:
    """Return the jobs in the table, of every state, as results in the order of their enqueues.

    Warns of jobs that wait for a commit, and so are not among them.
    """
    _warn_of_waiting(task, queue)
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
    _warn_of_waiting(task, queue, stacklevel=4)  # behind contextlib's frame


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
    found = [*_results(task, queue, after=0), *_waiting_for_commit(task, queue)]
    if found:
        raise AssertionError(f"expected no job, found {len(found)}. {_list_all()}")


def _results(task: AnyTask | None, queue: str | None, after: int) -> list[AnyResult]:
    jobs = Job.objects.using(conf.get().database).filter(pk__gt=after)
    if task is not None:
        jobs = jobs.filter(task=task.module_path)
    if queue is not None:
        jobs = jobs.filter(queue=queue)
    return [stored_result(str(pk)) for pk in jobs.order_by("id").values_list("id", flat=True)]


def _waiting_for_commit(task: AnyTask | None, queue: str | None) -> list[store.NewJob]:
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


def _warn_of_waiting(task: AnyTask | None, queue: str | None, *, stacklevel: int = 3) -> None:
    """Warn at the caller's line if jobs wait for a commit, which in a ``TestCase`` never comes."""
    waiting = _waiting_for_commit(task, queue)
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
    waiting = _waiting_for_commit(None, None)
    return f"{listed}\n{_said_of(waiting)}" if waiting else listed


# -- run it: now, or at once where it is enqueued


def run_pending(
    queue: str | None = None, *, until_empty: bool = True, at: datetime | None = None
) -> int:
    """Run the jobs that are ready, in this thread, and return how many attempts were made.

    The jobs pass through the real store, so states, attempts and results are as they would be. A
    failing function does not fail the test: look at its result after ``result.refresh()``. By
    default jobs that are enqueued meanwhile run as well; with ``until_empty=False`` no more
    attempts are made than jobs are ready now. ``at``, an aware datetime, stands for the current
    time of the queue: jobs deferred or backing off until then are due. A function that always
    snoozes for 0 seconds keeps this busy for ever. Warns of jobs that wait for a commit. Raises ``ValueError`` if ``at`` is naive.
    """
    if at is not None and at.utcoffset() is None:
        raise ValueError(f"at is {at!r}, without a time zone. Use an aware datetime.")
    with nullcontext() if at is None else clock.use(lambda: at):
        limit = None if until_empty else _count_ready(queue)
        attempts = 0
        while attempts != limit and _run_next(queue):
            attempts += 1
    _warn_of_waiting(None, queue)
    return attempts


def run_on_enqueue() -> _patch[Callable[..., None]]:
    """Run each job at once where it is enqueued: a context manager, and a decorator.

    It decorates functions, coroutine functions, and classes, of which it takes the methods that are
    tests.

    What ``enqueue`` returns has finished then, or waits for its next attempt: one attempt is made.
    Jobs of the same queue that were ready before run first, as they would with a worker. A job
    that is deferred, or whose queue is paused, stays as it is. Jobs run inside the caller's
    ``atomic()``, where a worker would only come after the commit; with ``enqueue_on_commit`` they are
    enqueued there, too, and need no commit.
    """
    # A decorator made of a plain context manager would let a coroutine function return unrun.
    return patch.multiple(RelayBackend, after_insert=_run, when_committed=_insert_now)


def _insert_now(
    backend: RelayBackend, insert: Callable[[], None], jobs: Sequence[store.NewJob]
) -> None:
    insert()


def _run(backend: RelayBackend, results: Sequence[AnyResult]) -> None:
    for result in results:
        job = Job.objects.using(conf.get().database).filter(pk=result.id, state=State.READY)
        while job.exists() and _run_next(result.task.queue_name):
            pass
    if isinstance(results, EnqueuedResults):
        results.refresh()
        return
    for result in results:
        result.refresh()


def _count_ready(queue: str | None) -> int:
    with store.transaction(rings=False) as tx:  # no worker is wanted here
        store.promote(tx)
    ready = Job.objects.using(conf.get().database).filter(state=State.READY)
    return ready.count() if queue is None else ready.filter(queue=queue).count()


def _run_next(queue: str | None) -> bool:
    """Run the next job; False if there is none. One at a time, so that no lease grows old."""
    with store.transaction(rings=False) as tx:
        store.promote(tx)
        queues = sorted(looks.ready_queues()) if queue is None else [queue]
        claims = store.claim(tx, worker_id=None, queues=queues, limit=1)
    follow_threads()
    for claim in claims:
        depths = {c.alias: len(c.atomic_blocks) for c in connections.all(initialized_only=True)}
        attempt = execute(Attempt(claim, JobContext.of(claim, worker="testing")))
        left = _undo_deeper(depths)
        if left and attempt.settled is None:
            attempt.settlement = outcome.uncommitted(claim, attempt.settlement, left)
        if attempt.settled is None:
            with store.transaction() as tx:
                store.settle(tx, [attempt.settlement])
    return bool(claims)


def _undo_deeper(depths: dict[str, int]) -> list[str]:
    """Undo what a function has left open in this thread; return the aliases where it has.

    ``depths`` says how many blocks were open before it, those of the test. A worker closes the
    connection, which here is the test's.
    """
    left = []
    for connection in connections.all(initialized_only=True):
        depth = depths.get(connection.alias, 0)
        if len(connection.atomic_blocks) > depth:
            left.append(connection.alias)
        while len(connection.atomic_blocks) > depth:
            connection.atomic_blocks[-1].__exit__(RuntimeError, None, None)
        if not depth and is_left_open(connection):
            left.append(connection.alias)
            connection.rollback()
            connection.set_autocommit(connection.settings_dict["AUTOCOMMIT"])
    return left
