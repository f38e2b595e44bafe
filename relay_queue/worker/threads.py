"""The threads that work for jobs, and the connections that are reset between two functions.

Each function finds new connections, in its own thread and in those that work for it. Some state is not
reset, because other threads may rely on it: the working directory, the environment, ``sys.path``, the
locale of the C library, ``threading.local``, threads and processes that a function started. Context
variables need no reset: each job runs in a copy of the context, its signals included. Django keeps the
active language and time zone in them.

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
from contextlib import suppress
from contextvars import Context, ContextVar, Token
from functools import partial, wraps
from typing import Any, cast

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from relay_queue.context import JobContext, current_context, enter, leave
from relay_queue.logs import get_logger

logger = get_logger(__name__)

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


def close_connections() -> list[str]:
    """Close this thread's connections, in whatever state they are. Never raises.

    The next use of an alias opens a new one, whatever ``CONN_MAX_AGE`` says: the state of a session
    cannot be reset as a whole. The next function would find the search path, role, time zone,
    read-only mode, temporary tables and advisory locks of this one. Returns the aliases of those
    whose transaction was still open: what was written there is not committed.
    """
    return [c.alias for c in connections.all(initialized_only=True) if _close(c)]


def undo_what_is_left_open() -> list[str]:
    """Close only those of this thread's connections that are in a transaction. Never raises.

    Returns like `close_connections`.
    """
    known = connections.all(initialized_only=True)
    return [c.alias for c in known if is_left_open(c) and _close(c)]


def is_left_open(connection: BaseDatabaseWrapper) -> bool:
    """Whether a connection that no block is around is in a transaction all the same."""
    if connection.connection is None and not connection.in_atomic_block:
        return False
    try:
        return _is_in_transaction(connection)
    except Exception:  # noqa: BLE001 - a driver that cannot even be asked is broken, not open
        return False


def _is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    return bool(
        connection.in_atomic_block
        or connection.closed_in_transaction
        or connection.needs_rollback
        or connection.autocommit != connection.settings_dict["AUTOCOMMIT"]
        # A BEGIN that went past Django shows only in the driver. Asking also finds a handle that
        # was closed past Django: the driver raises then.
        or getattr(connection.connection, "in_transaction", False)
        or _status(connection.connection)
    )


def _status(raw: Any) -> int:
    """Return where psycopg's connection is in a transaction, 0 outside; 0 for other drivers."""
    return int(getattr(getattr(raw, "info", None), "transaction_status", 0))


def _close(connection: BaseDatabaseWrapper) -> bool:
    """Roll back, close and forget the connection; return whether it was in a transaction."""
    if connection._thread_ident != threading.get_ident():  # type: ignore[attr-defined]
        # Lent by another thread, which goes on with it.
        del connections[connection.alias]
        return False
    left = is_left_open(connection)
    if left:
        with suppress(Exception):  # a log handler may raise
            logger.warning(
                "a task function left the connection %r in a transaction; "
                "it was rolled back and closed",
                connection.alias,
            )
        _leave_blocks(connection)
    with suppress(Exception):
        if connection.settings_dict["OPTIONS"].get("pool") and connection.connection is not None:
            # A pool would hand it to the next function as it is. It replaces one that is closed.
            connection.connection.close()
        connection.close()
    with suppress(AttributeError):
        del connections[connection.alias]
    return left


def _leave_blocks(connection: BaseDatabaseWrapper) -> None:
    # Django refuses to roll back or to close inside of a block, and the block's owner is gone.
    connection.in_atomic_block = False
    connection.closed_in_transaction = False
    connection.needs_rollback = False
    connection.savepoint_ids.clear()
    connection.atomic_blocks.clear()
    with suppress(Exception):
        connection.rollback()
