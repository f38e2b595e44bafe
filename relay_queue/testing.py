"""For the tests of projects that use Relay: run what was enqueued, here and now."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import datetime

from relay_queue import clock, conf, store
from relay_queue.models import Job
from relay_queue.states import State
from relay_queue.worker.context import JobContext
from relay_queue.worker.executor import execute


def run_pending(
    queue: str | None = None, *, until_empty: bool = True, at: datetime | None = None
) -> int:
    """Run the jobs that are ready, in this thread, and return how many attempts were made.

    The jobs pass through the real store, so states, attempts and results are as they would be, and
    it works inside of a ``TestCase``, whose transaction it joins. A failing function does not fail
    the test: look at its result after ``result.refresh()``. By default jobs that are enqueued
    meanwhile run as well; with ``until_empty=False`` no more attempts are made than jobs are ready
    now. ``at``, an aware datetime, stands for the current time: jobs deferred or backing off until
    then are due. A function that always snoozes for 0 seconds keeps this busy for ever.
    """
    with nullcontext() if at is None else clock.use(lambda: at):
        limit = None if until_empty else _count_ready(queue)
        attempts = 0
        while attempts != limit and _run_next(queue):
            attempts += 1
        return attempts


def _count_ready(queue: str | None) -> int:
    with store.transaction() as tx:
        store.promote(tx)
    ready = Job.objects.using(conf.get().database).filter(state=State.READY)
    return ready.count() if queue is None else ready.filter(queue=queue).count()


def _run_next(queue: str | None) -> bool:
    """Run the next job; False if there is none. One at a time, so that no lease grows old."""
    with store.transaction() as tx:
        store.promote(tx)
        queues = sorted(store.inspect.ready_queues()) if queue is None else [queue]
        claims = store.claim(tx, worker_id=None, queues=queues, limit=1)
    for claim in claims:
        finished = execute(claim, JobContext.of(claim, worker="testing"))
        if finished.settled is None:
            with store.transaction() as tx:
                store.settle(tx, [finished.settlement])
    return bool(claims)
