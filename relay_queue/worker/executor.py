"""Run one claimed job: resolve the task, run its function, report what became of it.

Nothing that a function does takes the worker down: whatever it raises is an outcome. Nothing here
settles a job either, but for ``atomic=True``, where the ack belongs to the function's transaction.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from datetime import datetime
from functools import lru_cache
from inspect import iscoroutinefunction
from time import monotonic, sleep
from typing import Any, NoReturn

from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.core.signals import setting_changed
from django.db import Error, connections, transaction

from relay_queue import announce, clock, conf, payload, store
from relay_queue.announce import warn
from relay_queue.compat import (
    AnyResult,
    TaskError,
    TaskResult,
    TaskResultStatus,
    task_backends,
)
from relay_queue.context import RelayContext, enter, leave
from relay_queue.exceptions import Cancelled, InvalidJob, TimedOut
from relay_queue.models import Lease
from relay_queue.results import complete, stored_result
from relay_queue.states import LAST_FAILURE, why_last
from relay_queue.store.dialects import dialect_for
from relay_queue.store.records import Claim, Settled, Settlement
from relay_queue.task import as_enqueued
from relay_queue.worker import outcome
from relay_queue.worker.attempt import Attempt, Rules, TaskPlan
from relay_queue.worker.threads import close_connections, end_own_thread, has_own_thread, own_thread

WRITER_SLICE_SECONDS = 4.0
"""How long an atomic function waits for the writer before it sees whether it is still wanted: less
than a process is left whose slots are all stuck."""

BUSY_PAUSE_SECONDS = 0.01


def execute(attempt: Attempt) -> Attempt:
    """Run an attempt in this thread, a coroutine function included, and return it. Never raises.

    The connections of this thread are left as the function left them: see
    `relay_queue.worker.threads`.
    """
    copy_context().run(_execute, attempt)
    return attempt


def _execute(attempt: Attempt) -> None:
    if begin(attempt):
        if attempt.plan.is_coroutine:
            # asgiref hands context variables back to the caller; a copy keeps them from us.
            run = async_to_sync(invoke_async)
            attempt.coroutine_result = copy_context().run(run, attempt)
        conclude(attempt)


def begin(attempt: Attempt) -> bool:
    """Resolve the task, decode its arguments and tell that it starts. Never raises.

    Returns whether the function is to be called. A job that can never run is finished here: fatal
    if its task or payload is at fault.
    """
    claim = attempt.claim
    attempt.started = monotonic()
    try:
        plan = attempt.plan = _plan(claim.task, claim.backend, claim.queue, claim.priority)
        attempt.args, attempt.kwargs = payload.decode(claim.payload)
    except BaseException as error:  # noqa: BLE001 - importing a module runs its code
        settlement = outcome.describe(claim, error, fatal=issubclass(type(error), InvalidJob))
        attempt.end_unrun(settlement, monotonic() - attempt.started)
        if _is_final(attempt):
            _log_death(attempt, logged=False)
        else:
            warn("job %s cannot run", _named(claim), exc_info=True)
        return False
    if plan.takes_context:
        _running_result(attempt)  # here, since it may read the database, and coroutines must not
    announce.started(plan.sender, _running_result, attempt)
    return True


def invoke(attempt: Attempt) -> Any:
    """Call the function. The caller runs this in a copy of the context, which then ends."""
    forks = _forks
    own, other = own_thread()
    before = enter(attempt.context)
    try:
        value = _call(attempt)
    finally:
        attempt.returned_at = monotonic()
        if _forks != forks:
            # A child that the function forked and did not end. It has our descriptors but not
            # our threads, and would report the outcome a second time.
            os._exit(0)
        # Receivers that hear of the end work for no job.
        leave(before)
        left = end_own_thread(own, other)
    if left or attempt.context.left_open:
        raise _left_open(attempt, left)
    return value


async def invoke_async(attempt: Attempt) -> Callable[[], Any]:
    """Await the function, up to the deadline of the attempt. Never raises.

    Returns what gives the function's result, or raises what the function raised.
    """
    left: list[str] = []
    try:
        # A thread of its own for the function's synchronous parts, made if there are any.
        async with ThreadSensitiveContext() as own:
            try:
                async with asyncio.timeout(attempt.context.remaining_seconds()) as limit:
                    enter(attempt.context)
                    value = await _call(attempt)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise TimedOut("the coroutine ran past its deadline; it was cancelled") from None
            finally:
                if has_own_thread(own):
                    left = await sync_to_async(close_connections)()
        if left or attempt.context.left_open:
            raise _left_open(attempt, left)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return _Raised(error)
    finally:
        attempt.returned_at = monotonic()
    return lambda: value


_forks = 0
"""How many forks lie between the first process and this one: cheaper to read than a process id."""


def _count_fork() -> None:
    global _forks  # noqa: PLW0603 - it stands for the process, of which there is one
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def _left_open(attempt: Attempt, left: list[str]) -> RuntimeError:
    # Each once, in order.
    return outcome.left_open(list(dict.fromkeys((*left, *attempt.context.left_open))))


def _call(attempt: Attempt) -> Any:
    if attempt.plan.takes_context:
        context = RelayContext(task_result=_running_result(attempt), job=attempt.context)
        return attempt.plan.func(context, *attempt.args, **attempt.kwargs)
    return attempt.plan.func(*attempt.args, **attempt.kwargs)


def conclude(attempt: Attempt) -> None:
    """Call the function, unless a coroutine has run already, and note its outcome. Never raises."""
    plan = attempt.plan
    try:
        if plan.atomic:
            value = _run_atomic(attempt)
        else:
            value = _value_of(attempt)
            attempt.settlement = outcome.success(attempt.claim, value)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
        attempt.settlement = outcome.failure(attempt, error)
        # Inside of the handler: receivers look for the exception with sys.exc_info().
        announce.finished(plan.sender, _failed_result, attempt, failed=True)
        _log_failure(attempt)
    else:
        announce.finished(plan.sender, _succeeded_result, attempt, value)
    now = monotonic()
    attempt.returned_at = attempt.returned_at or now
    attempt.run_seconds = now - attempt.started
    attempt.in_time = attempt.returned_at <= attempt.context.overdue_from
    # The outcome may wait long for its commit, and needs none of this.
    attempt.args = attempt.kwargs = attempt.shown = attempt.coroutine_result = None


def _value_of(attempt: Attempt) -> Any:
    """Return what the function returns or has returned; raises what it raises."""
    result, attempt.coroutine_result = attempt.coroutine_result, None
    return invoke(attempt) if result is None else result()


def _run_atomic(attempt: Attempt) -> Any:
    """Run the function and settle its ack in one transaction: effects happen once, or not at all.

    Returns the function's value, and notes settlement and answer in the attempt. Raises what the
    function raised, `TimedOut`, or `Cancelled` if the lease is no longer ours; its writes are
    rolled back then. Raises `NotBegun` if the writer could not be had.
    """
    committed: list[bool] = []
    alone = not connections[conf.get().database].in_atomic_block
    try:
        with ExitStack() as leaving:
            tx = _win_writer(attempt, leaving)
            # The first hook of this commit: a later one that raises must not look like a rollback.
            transaction.on_commit(lambda: committed.append(True), using=tx.connection.alias)
            _require_lease(attempt.claim, tx)
            value = _value_of(attempt)
            if attempt.context.timed_out:
                raise TimedOut("the function ran past its deadline; its writes were rolled back")
            settlement, settled = _settle(attempt.claim, value)
        if alone and not committed:
            raise RuntimeError("the function left an atomic block open, so nothing was committed")
    except BaseException:
        if not committed:
            raise
        warn("job %s succeeded, but a commit hook failed", _named(attempt.claim), exc_info=True)
    attempt.settlement, attempt.settled = settlement, settled
    return value


def _settle(claim: Claim, value: object) -> tuple[Settlement, Settled]:
    """Ack in the transaction of the function. Raises `Cancelled` if the ack is refused."""
    settlement = outcome.success(claim, value)
    # Joined, with a clock of its own: the function has taken time, and its lease may be over.
    with store.transaction() as ending:
        (settled,) = store.settle(ending, [settlement])
    if not settled.accepted:
        raise Cancelled(f"the ack was refused and its writes rolled back: {settled.reason}")
    return settlement, settled


def _win_writer(attempt: Attempt, leaving: ExitStack) -> store.Transaction:
    """Open the transaction of an atomic function; its time limit begins once the writer is won.

    Others may hold the writer for as long as they like, siblings in this process among them, and
    that is no attempt. Raises `NotBegun` if the function is not wanted any more or the database is
    away. It also gives up once it has waited for as long as a lease lasts.
    """
    attempt.context.waits = True
    give_up = monotonic() + attempt.claim.lease_seconds
    while True:
        seconds = min(WRITER_SLICE_SECONDS, max(give_up - monotonic(), 0.0))
        try:
            tx = leaving.enter_context(store.transaction(wait_seconds=seconds))
        except Error as error:
            connection = connections[conf.get().database]
            trouble = dialect_for(connection).diagnose(error)
            if trouble not in {"busy", "full", "lost"}:
                raise
            if trouble != "busy" or attempt.context.cancel_reason or monotonic() >= give_up:
                raise outcome.NotBegun(f"the writer could not be had: {error}") from error
            sleep(BUSY_PAUSE_SECONDS)  # a connection may have no patience of its own
        else:
            attempt.context.start_clock(attempt.claim.timeout_seconds)
            return tx


def _require_lease(claim: Claim, tx: store.Transaction) -> None:
    ours = Lease.objects.using(tx.connection.alias).filter(
        pk=claim.lease_id, token=claim.token, ended_at=None, expires_at__gt=tx.now
    )
    if not ours.exists():
        raise outcome.NotBegun("the lease ended before the function began")


class _Raised:
    """The outcome of a coroutine that raised; to be called once.

    It does not keep the error. A caller's frame would hold the error, and the error that frame. An
    idle worker would keep all that the function had at hand.
    """

    def __init__(self, error: BaseException) -> None:
        self._errors = [error]

    def __call__(self) -> NoReturn:
        raise self._errors.pop()


@lru_cache(maxsize=1024)
def _plan(path: str, backend: str, queue: str, priority: int) -> TaskPlan:
    task = as_enqueued(path, backend, queue, priority)
    return TaskPlan(
        task=task,
        func=task.func,
        sender=type(task_backends[backend]),
        rules=Rules(getattr(task, "retry_on", ()), getattr(task, "fatal_on", ())),
        takes_context=task.takes_context,
        is_coroutine=iscoroutinefunction(task.func),
        atomic=getattr(task, "atomic", False),
    )


def _running_result(attempt: Attempt) -> AnyResult:
    """Return what signals and the task's context show; made once, and only if it is asked for."""
    if attempt.shown is None:
        claim = attempt.claim
        started_at, errors, workers = _earlier(claim)
        attempt.shown = TaskResult(
            task=attempt.plan.task,
            id=str(claim.job_id),
            status=TaskResultStatus.RUNNING,
            enqueued_at=claim.created_at,
            started_at=started_at,
            finished_at=None,
            last_attempted_at=claim.acquired_at,
            args=attempt.args,
            kwargs=attempt.kwargs,
            backend=claim.backend,
            errors=errors,
            worker_ids=[*workers, attempt.context.worker],
        )
    return attempt.shown


def _earlier(claim: Claim) -> tuple[datetime, list[TaskError], list[str]]:
    """Return the first start of a job, and the errors and the workers of its earlier attempts.

    They are not in the claim, and a job that was ready all its life has none: nothing is read.
    """
    known = claim.acquired_at, list[TaskError](), [""] * (claim.attempt - 1)
    lived_seconds = (claim.acquired_at - claim.created_at).total_seconds()
    if claim.attempt == 1 and lived_seconds <= claim.wait_seconds:
        return known
    try:
        found = stored_result(str(claim.job_id))
    except Exception:  # noqa: BLE001 - whatever it is, the function may do without
        return known  # ``refresh()`` reads them, too
    workers = found.worker_ids[: claim.attempt - 1]
    return found.started_at or claim.acquired_at, found.errors, workers


def _succeeded_result(attempt: Attempt, value: Any) -> AnyResult:
    result = _running_result(attempt)
    complete(
        result, status=TaskResultStatus.SUCCESSFUL, finished_at=clock.now(), _return_value=value
    )
    return result


def _failed_result(attempt: Attempt) -> AnyResult:
    """Show the failure in the result: failed for good, or ready to be executed again."""
    result, settlement = _running_result(attempt), attempt.settlement
    if settlement.verb in {"snooze", "release"}:
        complete(result, status=TaskResultStatus.READY)
        return result
    final = _is_final(attempt)
    complete(
        result,
        status=TaskResultStatus.FAILED if final else TaskResultStatus.READY,
        finished_at=clock.now() if final else None,
    )
    error = TaskError(exception_class_path=settlement.error, traceback=settlement.traceback)
    result.errors.append(error)
    return result


def _log_failure(attempt: Attempt) -> None:
    job, over = _named(attempt.claim), attempt.context.cancel_reason
    verb, message = attempt.settlement.verb, attempt.settlement.message
    if verb == "release":
        warn("job %s goes back unrun: %s", job, message)
    elif verb == "snooze":
        return
    elif over:
        warn("job %s stopped after its lease had ended (%s): %s", job, over, message)
    elif _is_final(attempt):
        _log_death(attempt, logged=announce.logs_failures())
    else:
        warn("job %s will be tried again: %s", job, message)


def _log_death(attempt: Attempt, *, logged: bool) -> None:
    """Say why the job will not be tried again; ``logged`` if the framework logs its failure, too.

    Each death is one ERROR line with the traceback. As Django sets it up, the framework's goes
    nowhere unless ``DEBUG`` is on.
    """
    claim, settlement = attempt.claim, attempt.settlement
    settlement.death_logged = True
    why = why_last(fatal=settlement.fatal, attempt=claim.attempt)
    level = logging.WARNING if logged else logging.ERROR
    values = (_named(claim), why, settlement.message)
    warn(LAST_FAILURE, *values, exc_info=not logged, level=level)


def _named(claim: Claim) -> str:
    return f"{claim.job_id} ({claim.task})"


def _is_final(attempt: Attempt) -> bool:
    return attempt.settlement.fatal or attempt.claim.attempts_left < 1


def _forget(*, setting: str, **_: Any) -> None:
    if setting in {"TASKS", "INSTALLED_APPS"}:
        _plan.cache_clear()


setting_changed.connect(_forget, dispatch_uid="relay_queue.worker.executor")
