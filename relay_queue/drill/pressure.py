"""Rows in which nothing dies and much is asked: F7, F8, F11."""

from __future__ import annotations

from collections.abc import Iterator

from relay_queue import store
from relay_queue.backend import RelayBackend
from relay_queue.compat import task_backends
from relay_queue.drill import tasks
from relay_queue.drill.ground import Ground
from relay_queue.drill.observation import Observation, at_most, equal
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job, Lease
from relay_queue.scratch import processes
from relay_queue.states import State

CAPACITY = 1_000
SLOTS = 2
OTHER_THREADS = 2
"""Of a worker: its loop, and the waiter for the writer or the watch over its connection."""

MOST_GROWTH_MIB = 16
GO, NEVER = "go", "never made"


def failing(ground: Ground) -> Iterator[Observation]:
    """F7: fail until the budget is used up; and kill all workers during a back-off."""
    first = ground.work()
    hopeless = ground.enqueue(tasks.fail, 3, max_attempts=3)
    dead = ground.wait_state(hopeless, State.DEAD)
    failed = ["failed"] * 3
    yield equal("attempts", [*ground.outcomes(hopeless), dead.state], [*failed, "dead"])
    later = ground.enqueue(tasks.fail_with_a_pause)
    due = ground.wait_state(later, State.RETRYING).available_at
    first.kill()
    waits = ground.job(later)
    ground.work()
    ground.wait_state(later, State.SUCCEEDED)
    kept = waits.state == State.RETRYING and waits.available_at == due
    yield equal("back-off after all workers died", "kept" if kept else "forgotten", "kept")
    early = (due - ground.ledger(later)[1].acquired_at).total_seconds()
    yield at_most("tried again too early by, s", max(early, 0.0), 0.0)
    yield equal("the dead letter meanwhile", ground.job(hopeless).state, "dead")
    ground.do(store.requeue, [hopeless])
    ground.wait_state(hopeless, State.SUCCEEDED)
    yield equal("attempts once requeued", ground.outcomes(hopeless), [*failed, "acked"])


def flood(ground: Ground) -> Iterator[Observation]:
    """F8: fill a queue to its capacity, with slots for two jobs."""
    ground.work(concurrency=SLOTS)
    ground.do(store.ensure_queue, "default")
    with store.transaction() as tx:
        store.set_limits(tx, "default", capacity=CAPACITY, max_running=None)
    for _ in range(SLOTS):
        ground.wait_run(ground.enqueue(tasks.wait, GO))
    (worker,) = ground.pids()
    small = processes.resident_mib(worker)
    _enqueue_notes(CAPACITY - SLOTS)
    yield equal("ready on disk", Job.objects.filter(state=State.READY).count(), CAPACITY - SLOTS)
    yield equal("one more", _enqueue_one_more(ground), QueueFull.__name__)
    yield at_most("leases", Lease.objects.filter(ended_at=None).count(), SLOTS)
    ground.make(GO)
    unfinished = Job.objects.filter(finished_at=None)
    ground.wait(lambda: not unfinished.exists(), "the end of all jobs")
    yield equal("done", Lease.objects.filter(outcome="acked").count(), CAPACITY)
    threads, large = processes.threads(worker), processes.resident_mib(worker)
    if threads is not None and small is not None and large is not None:
        yield at_most("threads", threads, SLOTS + OTHER_THREADS)
        yield at_most("memory grown by, MiB", max(large - small, 0.0), MOST_GROWTH_MIB)


def _enqueue_notes(number: int) -> None:
    backend = task_backends["default"]
    assert isinstance(backend, RelayBackend)
    backend.enqueue_many([(tasks.note, (), {})] * number)


def _enqueue_one_more(ground: Ground) -> str:
    try:
        ground.enqueue(tasks.note)
    except QueueFull as refused:
        return type(refused).__name__
    return "taken"


def stopping(ground: Ground) -> Iterator[Observation]:
    """F11: tell workers to stop while one job can be finished, one cannot, and one waits."""
    workers = ground.work(concurrency=3)
    quick, slow = (ground.enqueue(tasks.wait, until) for until in (GO, NEVER))
    for job in (quick, slow):
        ground.wait_run(job)
    workers.tell_to_stop()
    ground.wait(lambda: "Stopping" in workers.said(), "the start of stopping")
    ground.make(GO)
    # Its worker has read the order by then: order and outcome wake it in one.
    ground.wait_state(quick, State.SUCCEEDED)
    waiting = ground.enqueue(tasks.note)
    code = workers.wait()
    yield equal("finished", ground.outcomes(quick), ["acked"])
    yield equal("handed back", ground.outcomes(slow), ["released"])
    rest = ground.job(slow)
    yield equal("state then", rest.state, "ready")
    yield equal("attempts charged", rest.attempt, 0)
    yield equal("enqueued meanwhile", ground.outcomes(waiting) or "unclaimed", "unclaimed")
    yield equal("exit code", code, 0)
    yield equal("workers left", len(ground.pids()), 0)
