"""The threads that work for a job besides its own, and the connections that they leave behind.

Django keeps connections by thread. A thread may outlive its function with a transaction open. Later
jobs would then write into that transaction, and their rows could be lost although they are acked.
Three kinds of threads run a function's database calls:

* asgiref's: outside of its ``ThreadSensitiveContext`` all synchronous code of all event loops of a
  process runs in one thread. Each job gets one of its own, if it needs any. It ends with the function.
* Those that a function starts. They close their connections as they end.
* Those of a ``ThreadPoolExecutor``, an event loop's own included, which may serve many jobs. They close
  their connections as they end, and before they work for another job.

All of them note on the job which transactions they found open. Three things are not seen: threads
that were not started by ``threading``, threads that still run when the function returns, and what
such a thread does afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, Token
from functools import partial, wraps
from typing import Any, cast

from asgiref.sync import SyncToAsync, ThreadSensitiveContext

from relay_queue.context import JobContext, current_context, enter, leave
from relay_queue.worker.connections import close_connections, undo_what_is_left_open

_following = threading.Lock()
_followed = False
_last = threading.local()
_pooled: ContextVar[bool] = ContextVar("relay_queue_pooled", default=False)


def follow_threads() -> None:
    """Let threads know, from now on and in this process, which job they work for.

    Python tells no thread who started it. This wraps ``Thread.start`` and
    ``ThreadPoolExecutor.submit``, as error reporters do; outside of jobs both work as they did.
    """
    global _followed  # noqa: PLW0603 - it stands for the two classes, of which there is one each
    with _following:
        if not _followed:
            thread, pool = cast("Any", threading.Thread), cast("Any", ThreadPoolExecutor)
            thread.start, pool.submit = _starting(thread.start), _submitting(pool.submit)
            _followed = True


def own_thread() -> tuple[ThreadSensitiveContext, Token[ThreadSensitiveContext]]:
    """Give the synchronous code of this context's event loops a thread of its own.

    It is started when it is first needed, and ends with `end_own_thread`, which takes both values.
    """
    own = ThreadSensitiveContext()
    return own, SyncToAsync.thread_sensitive_context.set(own)


def has_own_thread(own: ThreadSensitiveContext) -> bool:
    """Whether the thread of a context has been started."""
    return own in SyncToAsync.context_to_thread_executor


def end_own_thread(own: ThreadSensitiveContext, before: Token[ThreadSensitiveContext]) -> list[str]:
    """End the thread of `own_thread`, if it was ever started, with its connections.

    Waits for the code that runs there. Returns the aliases that were left in a transaction.
    """
    SyncToAsync.thread_sensitive_context.reset(before)
    if (
        not SyncToAsync.context_to_thread_executor
    ):  # the cheapest question, and nearly always answered by yes
        return []
    executor = SyncToAsync.context_to_thread_executor.pop(own, None)
    if executor is None:
        return []
    # Whatever job this is called in, the thread is not that job's.
    left = Context().run(executor.submit, close_connections).result()
    executor.shutdown()
    return left


def _starting(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @wraps(start)
    def started(thread: threading.Thread) -> None:
        job = current_context()
        if job is not None:
            own = SyncToAsync.thread_sensitive_context.get(None)
            thread.run = partial(_run, thread, thread.run, job, own)  # type: ignore[method-assign]
        elif _pooled.get():
            thread.run = partial(_run_in_pool, thread, thread.run)  # type: ignore[method-assign]
        start(thread)

    return started


def _run(
    thread: threading.Thread,
    run: Callable[[], None],
    job: JobContext,
    own: ThreadSensitiveContext | None,
) -> None:
    del thread.run  # it would keep itself, and the job, for as long as the thread object is kept
    try:
        _work_for(job, own, run)
    finally:
        job.left_open += tuple(close_connections())


def _run_in_pool(thread: threading.Thread, run: Callable[[], None]) -> None:
    del thread.run
    try:
        run()
    finally:
        close_connections()  # the collector, which would otherwise, may come much later


def _submitting(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @wraps(submit)
    def submitted(
        pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        job = current_context()
        if job is None:
            return submit(pool, call, *args, **kwargs)
        own = SyncToAsync.thread_sensitive_context.get(None)
        if own is None or SyncToAsync.context_to_thread_executor.get(own) is not pool:
            call = partial(_serve, job, own, call)
        return Context().run(_submit_for_no_job, submit, pool, call, *args, **kwargs)

    return submitted


def _submit_for_no_job(
    submit: Callable[..., Future[Any]], *args: Any, **kwargs: Any
) -> Future[Any]:
    # A thread that the pool starts for this call serves others, too.
    _pooled.set(True)
    return submit(*args, **kwargs)


def _serve(
    job: JobContext,
    own: ThreadSensitiveContext | None,
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if getattr(_last, "epoch", None) != job.epoch:
        close_connections()
        _last.epoch = job.epoch
    try:
        return _work_for(job, own, call, *args, **kwargs)
    finally:
        job.left_open += tuple(undo_what_is_left_open())


def _work_for(
    job: JobContext,
    own: ThreadSensitiveContext | None,
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    before = enter(job)
    token = None if own is None else SyncToAsync.thread_sensitive_context.set(own)
    try:
        return call(*args, **kwargs)
    finally:
        if token is not None:
            SyncToAsync.thread_sensitive_context.reset(token)
        leave(before)
