"""Every way to use a task. The comments are what the type checker must say."""

from datetime import datetime
from typing import assert_type, reveal_type

from django.utils import timezone

import relay_queue
from relay_queue import Changed, EnqueuedResults, JobContext, JobInfo, State
from relay_queue.backoff import Backoff
from relay_queue.compat import AnyResult, TaskResultStatus
from relay_queue.task import RelayTask
from relay_queue.testing import (
    assert_enqueued,
    assert_not_enqueued,
    capture_enqueued,
    enqueued,
    run_on_enqueue,
    run_pending,
)
from shop import tasks


def enqueue() -> None:
    """Enqueue, look at the results, and be told of each mistake."""
    result = tasks.plain.enqueue(7, note="x")
    assert_type(result.return_value, str)
    assert_type(result.status, TaskResultStatus)
    assert_type(result.enqueued_at, datetime | None)
    assert_type(tasks.every_option.enqueue(7, urgent=True).return_value, dict[str, int])
    assert_type(tasks.with_context.enqueue(7).return_value, int)
    assert_type(tasks.with_the_frameworks_context.enqueue(order_id=7).return_value, int)
    assert_type(tasks.plain.get_result("7").return_value, str)
    assert_type(tasks.plain.call(7), str)
    tasks.plain.enqueue("seven")  # error: arg-type
    tasks.plain.enqueue()  # error: call-arg
    tasks.plain.enqueue(7, nothing=1)  # error: call-arg
    tasks.with_context.enqueue(None, 7)  # error: arg-type call-arg
    tasks.coroutine.enqueue(1)  # error: arg-type
    assert_type(tasks.coroutine.enqueue("x").return_value, bool)
    assert_type(tasks.coroutine.call("x"), bool)
    assert_type(tasks.coroutine_with_options.enqueue("x").return_value, bool)
    assert_type(tasks.coroutine_with_context.enqueue("x").return_value, bool)
    tasks.coroutine_with_context.enqueue(1)  # error: arg-type


async def enqueue_from_a_coroutine() -> None:
    """Do the same with await."""
    result = await tasks.plain.aenqueue(7)
    assert_type(result.return_value, str)
    assert_type((await tasks.plain.aget_result("7")).return_value, str)
    assert_type(await tasks.plain.acall(7, "note"), str)
    assert_type((await tasks.coroutine.aenqueue("x")).return_value, bool)
    assert_type(await tasks.coroutine.acall("x"), bool)
    await tasks.plain.aenqueue("seven")  # error: arg-type
    await result.arefresh()


def with_options() -> None:
    """Change every option that an enqueue can change; the signature stays."""
    changed = tasks.plain.using(
        priority=1,
        queue_name="mail",
        run_after=timezone.now(),
        backend="bulk",
        idempotency_key="order-7",
        wait_seconds=1.5,
        max_attempts=7,
        backoff=Backoff(1),
        timeout_seconds=5,
        lease_seconds=30,
    )
    assert_type(changed.enqueue(7).return_value, str)
    changed.enqueue("seven")  # error: arg-type
    tasks.plain.using(prioritty=1)  # error: call-arg
    tasks.plain.using(idempotency_key=7)  # error: arg-type


def enqueue_many() -> None:
    """Enqueue calls of several tasks at once, each checked by its own signature."""
    results = relay_queue.enqueue_many(
        [tasks.plain.bind(7), tasks.every_option.bind(7, urgent=True), (tasks.plain, [7], {})]
    )
    assert_type(results, EnqueuedResults)
    assert_type(relay_queue.enqueue_many(tasks.plain.bind(n) for n in range(3)), EnqueuedResults)
    assert_type(relay_queue.enqueue_many(tasks.plain.bind(n) for n in range(3)), EnqueuedResults)
    assert_type(results[0], AnyResult)
    assert_type(results.ids, list[str])
    tasks.plain.bind("seven")  # error: arg-type
    relay_queue.enqueue_many([tasks.plain])  # error: list-item


def operate() -> None:
    """Do to jobs and queues what a program may do."""
    result = tasks.plain.enqueue(7)
    for job in (7, "7", result, relay_queue.get_job(7)):
        relay_queue.cancel(job)
    assert_type(relay_queue.get_job(result), JobInfo)
    assert_type(relay_queue.get_job(7).state, State)
    assert_type(relay_queue.cancel_many([7, result]), Changed)
    assert_type(relay_queue.requeue_many([7]).skipped, dict[int, str])
    assert_type(relay_queue.pause("mail"), bool)
    assert_type(relay_queue.wait_for(result, timeout_seconds=5), AnyResult)
    assert_type(relay_queue.current_context(), JobContext | None)
    relay_queue.set_limits("mail", capacity=None)
    relay_queue.set_limits("mail", capacity="7")  # error: arg-type
    relay_queue.set_limits("mail", capicity=7)  # error: call-arg
    relay_queue.cancel(None)  # error: arg-type
    relay_queue.set_priority(7)  # error: call-arg
    relay_queue.cancell(7)  # error: attr-defined


async def operate_from_a_coroutine() -> None:
    """Do the same with await."""
    assert_type(await relay_queue.aenqueue_many([tasks.plain.bind(7)]), EnqueuedResults)
    assert_type(await relay_queue.acancel_many([7]), Changed)
    assert_type(await relay_queue.aget_job(7), JobInfo)
    assert_type(await relay_queue.await_for(7, 5), AnyResult)
    await relay_queue.aset_limits("mail", max_running=7)
    await relay_queue.acancel(None)  # error: arg-type
    await relay_queue.aset_priority(7)  # error: call-arg


@run_on_enqueue()
def look() -> None:
    """Use the testing helpers."""
    assert_type(run_pending("mail", until_empty=False, at=timezone.now()), int)
    assert_type(assert_enqueued(tasks.plain, args=[7], kwargs={}, count=1), list[AnyResult])
    assert_type(enqueued(queue="mail"), list[AnyResult])
    assert_not_enqueued(tasks.plain)
    with capture_enqueued(tasks.plain) as captured:
        assert_type(captured, list[AnyResult])
    with run_on_enqueue():
        assert_type(tasks.plain.enqueue(7).return_value, str)


def generic(task: RelayTask[[int], str]) -> str:
    """Take any task of a signature."""
    return task.enqueue(7).return_value


generic(tasks.with_context)  # error: arg-type
reveal_type(tasks.plain.enqueue)
reveal_type(tasks.plain.aenqueue)
reveal_type(tasks.with_context.enqueue)
