"""Run one claimed job: resolve the task, run its function, report what became of it.

Nothing that a function does takes the worker down: whatever it raises is an outcome. Nothing here
settles a job either, but for ``atomic=True``, where the ack belongs to the function's transaction.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
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
    AnyTask,
    BaseTaskBackend,
    TaskError,
    TaskResult,
    TaskResultStatus,
    task_backends,
)
from relay_queue.context import JobContext, RelayContext, enter
from relay_queue.exceptions import Cancelled, InvalidJob, TimedOut
from relay_queue.models import Lease
from relay_queue.store.dialects import dialect_for
from relay_queue.store.records import Claim, Settled, Settlement
from relay_queue.task import as_enqueued
from relay_queue.worker import report
from relay_queue.worker.hygiene import close_connections
from relay_queue.worker.threads import end_own_thread, has_own_thread, own_thread

WRITER_SLICE_SECONDS = 4.0
"""How long an atomic function waits for the writer before it sees whether it is still wanted: less
than a process is left whose slots are all stuck."""

BUSY_PAUSE_SECONDS = 0.01

Outcome = Callable[[], Any]
"""Returns the function's result, or raises what the function raised."""


@dataclass(slots=True)
class Finished:
    """An attempt that is over. ``settled`` is set if the function's transaction has acked it.

    ``returned_at`` is a reading of ``time.monotonic``: the attempt is judged by it, however long
    its outcome waits for the writer. ``in_time`` says whether that was within the time limit.
    """

    claim: Claim
    settlement: Settlement
    run_seconds: float
    settled: Settled | None = None
    returned_at: float = field(default_factory=monotonic)
    in_time: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """What all jobs of one task have in common; made once."""

    task: AnyTask
    func: Callable[..., Any]
    sender: type[BaseTaskBackend]
    rules: report.Rules
    takes_context: bool
    is_coroutine: bool
    atomic: bool


@dataclass(slots=True)
class Call:
    """One attempt, ready to run."""

    claim: Claim
    context: JobContext
    plan: Plan
    args: list[Any]
    kwargs: dict[str, Any]
    started: float
    returned: float | None = None
    built: AnyResult | None = None

    def result(self) -> AnyResult:
        """Return what signals and the task's context show; made once, and only if it is asked for.

        The workers and the errors of earlier attempts are not in the claim: ``refresh()`` reads
        them.
        """
        if self.built is None:
            self.built = _result_of(self)
        return self.built

    def invoke(self) -> Any:
        """Call the function in a copy of the context: what it sets there ends with it."""
        process = os.getpid()
        alone = copy_context()
        own = alone.run(own_thread)
        try:
            value = alone.run(self._call)
        finally:
            self.returned = monotonic()
            if os.getpid() != process:
                # A child that the function forked and did not end. It has our descriptors but not
                # our threads, and would report the outcome a second time.
                os._exit(0)
            left = end_own_thread(own)
        if left or self.context.left_open:
            raise self._left_open(left)
        return value

    async def invoke_async(self) -> Outcome:
        """Await the function, up to the deadline of the attempt. Never raises."""
        left: list[str] = []
        try:
            # A thread of its own for the function's synchronous parts, made if there are any.
            async with ThreadSensitiveContext() as own:
                try:
                    async with asyncio.timeout(self.context.remaining_seconds()) as limit:
                        value = await self._call()
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise TimedOut(
                        "the coroutine ran past its deadline; it was cancelled"
                    ) from None
                finally:
                    if has_own_thread(own):
                        left = await sync_to_async(close_connections)()
            if left or self.context.left_open:
                raise self._left_open(left)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
            return _Raised(error)
        finally:
            self.returned = monotonic()
        return lambda: value

    def _left_open(self, left: list[str]) -> RuntimeError:
        # Each once, in order.
        return report.left_open(list(dict.fromkeys((*left, *self.context.left_open))))

    def _call(self) -> Any:
        enter(self.context)
        if self.plan.takes_context:
            context = RelayContext(task_result=self.result(), job=self.context)
            return self.plan.func(context, *self.args, **self.kwargs)
        return self.plan.func(*self.args, **self.kwargs)


def execute(claim: Claim, context: JobContext) -> Finished:
    """Run a job in this thread, a coroutine function included. Never raises.

    The connections of this thread are left as the function left them: see
    `relay_queue.worker.hygiene`.
    """
    call = begin(claim, context)
    if isinstance(call, Finished):
        return call
    if call.plan.is_coroutine:
        # asgiref hands context variables back to the caller; a copy keeps them from us.
        return conclude(call, copy_context().run(async_to_sync(call.invoke_async)))
    return conclude(call, call.invoke)


def begin(claim: Claim, context: JobContext) -> Call | Finished:
    """Resolve the task, decode its arguments and tell that it starts. Never raises.

    A job that can never run is finished here: fatal if its task or payload is at fault.
    """
    started = monotonic()
    try:
        plan = _plan(claim.task, claim.backend, claim.queue, claim.priority)
        args, kwargs = payload.decode(claim.payload)
    except BaseException as error:  # noqa: BLE001 - importing a module runs its code
        warn("job %s cannot run: %s", claim.job_id, claim.task, exc_info=True)
        told = report.describe(claim, error, fatal=issubclass(type(error), InvalidJob))
        return Finished(claim, told, monotonic() - started)
    call = Call(claim, context, plan, args, kwargs, started)
    announce.started(plan.sender, call.result)
    return call


def conclude(call: Call, outcome: Outcome) -> Finished:
    """Get the outcome, which for most functions means to run them now, and report. Never raises."""
    settled = None
    try:
        if call.plan.atomic:
            settlement, value, settled = _run_atomic(call, outcome)
        else:
            value = outcome()
            settlement = report.success(call.claim, value)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
        settlement = report.failure(call.claim, call.context, call.plan.rules, error)
        # Inside of the handler: receivers look for the exception with sys.exc_info().
        announce.finished(call.plan.sender, lambda: _failed_result(call, settlement), failed=True)
        _log_failure(call, settlement)
    else:
        announce.finished(call.plan.sender, lambda: _succeeded_result(call, value))
    seconds, returned = monotonic() - call.started, call.returned or monotonic()
    in_time = returned <= call.context.overdue_from
    return Finished(call.claim, settlement, seconds, settled, returned, in_time)


def _run_atomic(call: Call, outcome: Outcome) -> tuple[Settlement, Any, Settled]:
    """Run the function and settle its ack in one transaction: effects happen once, or not at all.

    Raises what the function raised, `TimedOut`, or `Cancelled` if the lease is no longer ours; its
    writes are rolled back then. Raises `NotBegun` if the writer could not be had.
    """
    committed: list[bool] = []
    alone = not connections[conf.get().database].in_atomic_block
    try:
        with ExitStack() as leaving:
            tx = _win_writer(call, leaving)
            # The first hook of this commit: a later one that raises must not look like a rollback.
            transaction.on_commit(lambda: committed.append(True), using=tx.connection.alias)
            _require_lease(call.claim, tx)
            value = outcome()
            if call.context.timed_out:
                raise TimedOut("the function ran past its deadline; its writes were rolled back")
            settlement = report.success(call.claim, value)
            # Joined, with a clock of its own: the function has taken time, and its lease may be over.
            with store.transaction() as ending:
                (settled,) = store.settle(ending, [settlement])
            if not settled.accepted:
                raise Cancelled(f"the ack was refused and its writes rolled back: {settled.reason}")
        if alone and not committed:
            raise RuntimeError("the function left an atomic block open, so nothing was committed")
    except BaseException:
        if not committed:
            raise
        warn("job %s succeeded, but a commit hook failed", call.claim.job_id, exc_info=True)
    return settlement, value, settled


def _win_writer(call: Call, leaving: ExitStack) -> store.Transaction:
    """Open the transaction of an atomic function; its time limit begins once the writer is won.

    Others may hold the writer for as long as they like, siblings in this process among them, and
    that is no attempt. Raises `NotBegun` if the function is not wanted any more, the writer cannot be
    had for as long as a lease lasts, or the database is not there.
    """
    call.context.waits = True
    give_up = monotonic() + call.claim.lease_seconds
    while True:
        seconds = min(WRITER_SLICE_SECONDS, max(give_up - monotonic(), 0.0))
        try:
            tx = leaving.enter_context(store.transaction(wait_seconds=seconds))
        except Error as error:
            connection = connections[conf.get().database]
            trouble = dialect_for(connection).diagnose(error)
            if trouble not in {"busy", "full", "lost"}:
                raise
            if trouble != "busy" or call.context.cancel_reason or monotonic() >= give_up:
                raise report.NotBegun(f"the writer could not be had: {error}") from error
            sleep(BUSY_PAUSE_SECONDS)  # a connection may have no patience of its own
        else:
            call.context.start_clock(call.claim.timeout_seconds)
            return tx


def _require_lease(claim: Claim, tx: store.Transaction) -> None:
    ours = Lease.objects.using(tx.connection.alias).filter(
        pk=claim.lease_id, token=claim.token, ended_at=None, expires_at__gt=tx.now
    )
    if not ours.exists():
        raise report.NotBegun("the lease ended before the function began")


class _Raised:
    """The outcome of a coroutine that raised; to be called once.

    It does not keep the error: a caller's frame would then be held by the error that it holds, and
    with it, in an idle worker for ever, everything that the function had at hand.
    """

    def __init__(self, error: BaseException) -> None:
        self._errors = [error]

    def __call__(self) -> NoReturn:
        raise self._errors.pop()


@lru_cache(maxsize=1024)
def _plan(path: str, backend: str, queue: str, priority: int) -> Plan:
    task = as_enqueued(path, backend, queue, priority)
    return Plan(
        task=task,
        func=task.func,
        sender=type(task_backends[backend]),
        rules=report.Rules(getattr(task, "retry_on", ()), getattr(task, "fatal_on", ())),
        takes_context=task.takes_context,
        is_coroutine=iscoroutinefunction(task.func),
        atomic=getattr(task, "atomic", False),
    )


def _result_of(call: Call) -> AnyResult:
    claim = call.claim
    return TaskResult(
        task=call.plan.task,
        id=str(claim.job_id),
        status=TaskResultStatus.RUNNING,
        enqueued_at=claim.created_at,
        started_at=claim.acquired_at,
        finished_at=None,
        last_attempted_at=claim.acquired_at,
        args=call.args,
        kwargs=call.kwargs,
        backend=claim.backend,
        errors=[],
        worker_ids=[""] * (claim.attempt - 1) + [call.context.worker],
    )


def _succeeded_result(call: Call, value: Any) -> AnyResult:
    result = call.result()
    _set(result, status=TaskResultStatus.SUCCESSFUL, finished_at=clock.now(), _return_value=value)
    return result


def _failed_result(call: Call, told: Settlement) -> AnyResult:
    """Show the failure in the result: failed for good, or ready to be executed again."""
    result = call.result()
    if told.verb in {"snooze", "release"}:
        _set(result, status=TaskResultStatus.READY)
        return result
    final = _is_final(call, told)
    _set(
        result,
        status=TaskResultStatus.FAILED if final else TaskResultStatus.READY,
        finished_at=clock.now() if final else None,
    )
    result.errors.append(TaskError(exception_class_path=told.error, traceback=told.traceback))
    return result


def _log_failure(call: Call, told: Settlement) -> None:
    job_id, over = call.claim.job_id, call.context.cancel_reason
    if told.verb == "release":
        warn("job %s goes back unrun: %s", job_id, told.message)
    elif told.verb == "snooze" or _is_final(call, told):
        return  # the framework's own receiver logs the final ones
    elif over:
        warn("job %s stopped after its lease had ended (%s): %s", job_id, over, told.message)
    else:
        warn("job %s will be tried again: %s", job_id, told.message)


def _is_final(call: Call, told: Settlement) -> bool:
    return told.fatal or call.claim.attempts_left < 1


def _set(result: AnyResult, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(result, name, value)


def _forget(*, setting: str, **_: Any) -> None:
    if setting in {"TASKS", "INSTALLED_APPS"}:
        _plan.cache_clear()


setting_changed.connect(_forget, dispatch_uid="relay_queue.worker.executor")
