"""Tasks with every option there is."""

from relay_queue import RelayContext
from relay_queue.backoff import Backoff
from relay_queue.compat import TaskContext
from relay_queue.exceptions import Fatal, Retry, Snooze
from relay_queue.task import task


@task
def plain(order_id: int, note: str = "") -> str:
    """Return a text."""
    return f"{order_id} {note}"


@task(
    priority=5,
    queue_name="mail",
    backend="default",
    takes_context=False,
    max_attempts=5,
    backoff=Backoff(base_seconds=2, max_seconds=60, jitter="full"),
    retry_on=(ConnectionError, TimeoutError),
    fatal_on=(LookupError,),
    timeout_seconds=1.5,
    lease_seconds=30,
    atomic=True,
    max_payload_bytes=4096,
)
def every_option(order_id: int, *, urgent: bool = False) -> dict[str, int]:
    """Return a dictionary."""
    if order_id < 0:
        raise Fatal("no such order")
    if order_id == 0:
        raise Retry(after_seconds=2.5)
    if urgent:
        raise Snooze(1)
    return {"order": order_id}


@task(takes_context=True)
def with_context(context: RelayContext, order_id: int) -> int:
    """Return what the context knows."""
    context.raise_if_cancelled()
    return context.job_id + context.attempt + context.epoch + order_id


@task(takes_context=True, max_attempts=2)
def with_the_frameworks_context(context: TaskContext[..., object], order_id: int) -> int:
    """Return what the framework's context knows."""
    return context.attempt + order_id


@task(timeout_seconds=10)
async def coroutine(host: str) -> bool:
    """Return whether there is a host."""
    return bool(host)


@task(max_attempts=5)
async def coroutine_with_options(host: str) -> bool:
    """Return whether there is a host."""
    return bool(host)


@task(takes_context=True)
async def coroutine_with_context(context: RelayContext, host: str) -> bool:
    """Return whether there is a host, and a context."""
    return bool(host and context)
