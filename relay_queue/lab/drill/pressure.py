"""Rows about load and limits: failures that repeat (F7), a full queue (F8), an order to stop (F11)."""

from __future__ import annotations

from collections.abc import Iterator

from relay_queue import store
from relay_queue.backoff import Backoff
from relay_queue.exceptions import QueueFull
from relay_queue.lab import processes, tasks
from relay_queue.lab.drill.results import Observation, at_most, equal
from relay_queue.lab.project import ScratchProject, enqueue_many
from relay_queue.models import Job, Lease
from relay_queue.states import State

PAUSE = Backoff(1.0, 300.0)
CAPACITY = 1_000
SLOTS = 2
OTHER_THREADS = 2
"""Of a worker: its loop, and the waiter for the writer or the watch over its connection."""

MOST_GROWTH_MIB = 16
GO, NEVER = "go", "never made"


def failing(project: ScratchProject) -> Iterator[Observation]:
    """F7: fail until the budget is used up; and kill all workers during a back-off."""
    first = project.work()
    hopeless = project.enqueue(tasks.fail, 3, max_attempts=3)
    dead = project.wait_state(hopeless, State.DEAD)
    failed = ["failed"] * 3
    yield equal("attempts", [*project.outcomes(hopeless), dead.state], [*failed, "dead"])
    later = project.enqueue(tasks.fail, 1, backoff=PAUSE)
    due = project.wait_state(later, State.RETRYING).available_at
    first.kill()
    waits = project.job(later)
    project.work()
    project.wait_state(later, State.SUCCEEDED)
    kept = waits.state == State.RETRYING and waits.available_at == due
    yield equal("back-off after all workers died", "kept" if kept else "forgotten", "kept")
    early = (due - project.ledger(later)[1].acquired_at).total_seconds()
    yield at_most("tried again too early by, s", max(early, 0.0), 0.0)
    yield equal("the dead letter meanwhile", project.job(hopeless).state, "dead")
    project.do(store.requeue, [hopeless])
    project.wait_state(hopeless, State.SUCCEEDED)
    yield equal("attempts once requeued", project.outcomes(hopeless), [*failed, "acked"])


def flood(project: ScratchProject) -> Iterator[Observation]:
    """F8: fill a queue to its capacity, with slots for two jobs."""
    project.work(concurrency=SLOTS)
    project.do(store.ensure_queue, "default")
    project.do(store.set_limits, "default", capacity=CAPACITY, max_running=None)
    for _ in range(SLOTS):
        project.wait_run(project.enqueue(tasks.wait, GO))
    (worker,) = project.pids()
    small = processes.resident_mib(worker)
    enqueue_many([tasks.finish.bind()] * (CAPACITY - SLOTS))
    yield equal("ready on disk", Job.objects.filter(state=State.READY).count(), CAPACITY - SLOTS)
    yield equal("one more", _enqueue_one_more(project), QueueFull.__name__)
    yield at_most("leases", Lease.objects.filter(ended_at=None).count(), SLOTS)
    project.make(GO)
    unfinished = Job.objects.filter(finished_at=None)
    project.wait("the end of all jobs", lambda: not unfinished.exists())
    yield equal("done", Lease.objects.filter(outcome="acked").count(), CAPACITY)
    threads, large = processes.threads(worker), processes.resident_mib(worker)
    if threads is not None and small is not None and large is not None:
        yield at_most("threads", threads, SLOTS + OTHER_THREADS)
        yield at_most("memory grown by, MiB", max(large - small, 0.0), MOST_GROWTH_MIB)


def _enqueue_one_more(project: ScratchProject) -> str:
    try:
        project.enqueue(tasks.finish)
    except QueueFull as refused:
        return type(refused).__name__
    return "taken"


def stopping(project: ScratchProject) -> Iterator[Observation]:
    """F11: tell workers to stop while one job can be finished, one cannot, and one waits."""
    workers = project.work(concurrency=3)
    quick, slow = (project.enqueue(tasks.wait, until) for until in (GO, NEVER))
    for job in (quick, slow):
        project.wait_run(job)
    workers.tell_to_stop()
    project.wait("the start of stopping", lambda: "Stopping" in workers.said())
    project.make(GO)
    # Its worker has read the order by then: order and outcome wake it in one.
    project.wait_state(quick, State.SUCCEEDED)
    waiting = project.enqueue(tasks.finish)
    code = workers.wait()
    yield equal("finished", project.outcomes(quick), ["acked"])
    yield equal("handed back", project.outcomes(slow), ["released"])
    rest = project.job(slow)
    yield equal("state then", rest.state, "ready")
    yield equal("attempts charged", rest.attempt, 0)
    yield equal("enqueued meanwhile", project.outcomes(waiting) or "unclaimed", "unclaimed")
    yield equal("exit code", code, 0)
    yield equal("workers left", len(project.pids()), 0)
