"""Run what was enqueued: now, or at once where it is enqueued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING
from unittest.mock import patch

from django.db import connections

from relay_queue import clock, conf, store
from relay_queue.backend import RelayBackend
from relay_queue.compat import AnyResult
from relay_queue.context import JobContext
from relay_queue.models import Job
from relay_queue.query import looks
from relay_queue.results import EnqueuedResults
from relay_queue.states import State
from relay_queue.testing.looking import warn_of_waiting
from relay_queue.worker import outcome
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.connections import is_left_open
from relay_queue.worker.executor import execute
from relay_queue.worker.threads import follow_threads

if TYPE_CHECKING:
    from unittest.mock import _patch


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
    warn_of_waiting(None, queue)
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
