"""Task functions for tests, in a module that worker processes can import.

``calls`` is what the functions of this process have noted, in order.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import Group
from django.db import connection, connections, transaction

from relay_queue.compat import TaskContext
from relay_queue.context import RelayContext, current_context
from relay_queue.exceptions import Fatal, Retry, Snooze
from relay_queue.task import task

calls: list[Any] = []
gate = threading.Event()
"""Functions that wait for a test wait for this."""

WAIT_SECONDS = 30.0


@task
def noop() -> None:
    pass


tenant: ContextVar[str] = ContextVar("tenant", default="none")


@task
def become_tenant(name: str) -> None:
    tenant.set(name)


@task
def add(left: int, right: int = 0) -> int:
    return left + right


@task
def echo(value: Any) -> Any:
    return value


@task
def note(value: Any) -> None:
    calls.append(value)


@task
def enqueue_note(value: Any) -> None:
    note.enqueue(value)


@task
def fail(message: str = "no") -> None:
    raise ValueError(message)


@task(max_attempts=1)
def fail_once_only() -> None:
    raise ValueError("no")


@task(max_attempts=1)
def read_file(path: str) -> str:
    return Path(path).read_text()


@task
def fatal() -> None:
    raise Fatal("give up")


@task(fatal_on=(LookupError,))
def fatal_on_lookup(kind: str) -> None:
    raise {"key": KeyError, "value": ValueError}[kind](kind)


@task(retry_on=(ConnectionError,))
def retry_on_connection(kind: str) -> None:
    raise {"connection": ConnectionResetError, "value": ValueError}[kind](kind)


@task
def retry_later(after_seconds: Any) -> None:
    error = Retry(after_seconds=0)
    error.after_seconds = after_seconds
    raise error


@task
def snooze(seconds: Any) -> None:
    error = Snooze(0)
    error.seconds = seconds
    raise error


@task(takes_context=True)
def describe(context: RelayContext, note: str) -> dict[str, Any]:
    return {
        "job_id": context.job_id,
        "attempt": context.attempt,
        "epoch": context.epoch,
        "key": context.idempotency_key,
        "same": current_context() is context.job,
        "result_id": context.task_result.id,
        "note": note,
    }


@task(takes_context=True)
def describe_context(context: TaskContext, value: int) -> dict[str, Any]:
    return {
        "is_context": isinstance(context, TaskContext),
        "attempt": context.attempt,
        "id": context.task_result.id,
        "status": str(context.task_result.status),
        "args": context.task_result.args,
        "workers": len(context.task_result.worker_ids),
    }


def note_history(context: RelayContext) -> None:
    shown = context.task_result
    errors = [error.exception_class_path for error in shown.errors]
    calls.append((shown.attempts, shown.started_at, shown.last_attempted_at, errors))
    if context.attempt < 3:
        raise KeyError(context.attempt)


@task(takes_context=True)
def tell_history(context: RelayContext) -> None:
    note_history(context)


@task(takes_context=True)
async def tell_history_async(context: RelayContext) -> None:
    note_history(context)


@task(takes_context=True)
def fail_with_attempt(context: TaskContext) -> None:
    raise ValueError(f"attempt {context.attempt}")


@task(takes_context=True)
def wait_until_cancelled(context: RelayContext) -> None:
    while True:
        context.raise_if_cancelled()
        gate.wait(0.005)


@task
def wait() -> str:
    assert gate.wait(WAIT_SECONDS)
    return threading.current_thread().name


@task
async def add_async(left: int, right: int) -> int:
    await asyncio.sleep(0)
    return left + right


@task
async def fail_async() -> None:
    raise ValueError("no")


@task(timeout_seconds=60)
async def sleep_async(seconds: float) -> None:
    await asyncio.sleep(seconds)


@task
async def count_groups() -> int:
    return await Group.objects.acount()


@task
async def wait_async() -> str:
    while not gate.is_set():
        await asyncio.sleep(0.005)
    return threading.current_thread().name


async def _exit() -> None:
    raise SystemExit("in a child task")


@task
async def exit_in_child_task() -> None:
    child = asyncio.ensure_future(_exit())
    while not child.done():
        await asyncio.sleep(0)
    child.exception()


@task
def fork_and_return() -> int:
    return os.fork()


@task
def fork_and_raise() -> None:
    raise ValueError(str(os.fork()))


@task
def note_queries() -> None:
    calls.append(len(connection.queries_log))
    Group.objects.exists()


@task
def note_connection() -> None:
    connection.ensure_connection()
    calls.append(connection.connection)


# --- Functions that write -------------------------------------------------------------


@task
def create_group(name: str) -> int:
    return int(Group.objects.create(name=name).pk)


@task(atomic=True, timeout_seconds=2)
def create_group_atomically(name: str, then: str = "") -> int:
    group = Group.objects.create(name=name)
    transaction.on_commit(lambda: calls.append(f"committed {name}"))
    if then == "fail":
        raise ValueError("after the write")
    if then == "exit":
        raise SystemExit("after the write")
    if then == "close":
        connection.close()
    if then == "close the handle":
        connection.connection.close()
    if then == "leave a block open":
        transaction.atomic().__enter__()
    if then == "roll back":
        transaction.set_rollback(True)
    if then == "unstorable":
        return {1}  # type: ignore[return-value]
    if then == "hook":
        transaction.on_commit(_broken_hook)
    if then == "wait":
        gate.wait(0.05)
    return int(group.pk)


def _broken_hook() -> None:
    raise ValueError("in the hook")


# --- Poison ----------------------------------------------------------------------------


class Odd(BaseException):
    """Not even an Exception."""


class Mute(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise SystemExit("in str")

    def __repr__(self) -> str:
        raise KeyboardInterrupt("in repr")


class Liar(Exception):
    """Raises when it is asked for its class."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("in __class__")


class Nameless(type):
    """A class that will not tell its name."""

    def __getattribute__(cls, name: str) -> Any:
        if name in {"__module__", "__qualname__", "__name__"}:
            raise RuntimeError("in the metaclass")
        return super().__getattribute__(name)


class Anonymous(Exception, metaclass=Nameless):
    """An instance of the above."""


class HugeNotes(Exception):
    """Has notes that raise."""

    __notes__: ClassVar[Any] = property(lambda self: 1 / 0)


def _raise_recursion() -> None:
    _raise_recursion()


class Unequal:
    """A result that is no JSON."""


POISON = {
    "odd": lambda: Odd("odd"),
    "mute": Mute,
    "liar": lambda: Liar("liar"),
    "anonymous": lambda: Anonymous("who"),
    "notes": lambda: HugeNotes("notes"),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "generator": GeneratorExit,
    "stop": lambda: StopIteration(1),
    "memory": MemoryError,
    "cancelled": asyncio.CancelledError,
    "surrogate": lambda: ValueError("\ud800 and \x00 and more"),
    "long": lambda: ValueError("x" * 1_000_000),
    "lines": lambda: ValueError("one\ntwo\r\nthree"),
    "group": lambda: BaseExceptionGroup("many", [ValueError(str(n)) for n in range(1000)]),
    "empty": ValueError,
}


@task
def poison(kind: str) -> None:
    if kind == "recursion":
        _raise_recursion()
    raise POISON[kind]()


@task
def fail_at_length(chars: int) -> None:
    raise ValueError("x" * chars)


@task
async def poison_async(kind: str) -> None:
    raise POISON[kind]()


@task
def give_back(kind: str) -> Any:
    return {"set": {1}, "object": Unequal(), "nan": float("nan"), "huge": "x" * 2_000_000}[kind]


@task
def leave_atomic_open() -> None:
    transaction.atomic().__enter__()
    Group.objects.create(name="never committed")


@task
async def leave_atomic_open_async() -> None:
    await sync_to_async(leave_atomic_open.func)()


@task
def begin_by_hand() -> None:
    connection.cursor().execute("BEGIN")


@task
def turn_autocommit_off() -> None:
    transaction.set_autocommit(False)


@task
def close_the_handle() -> None:
    connection.ensure_connection()
    connection.connection.close()


@task
def break_the_block() -> None:
    with transaction.atomic():
        transaction.set_rollback(True)


not_a_task = add.func


def plain(value: int) -> int:
    return value


alias = add


@task
def change_directory(path: str) -> None:
    os.chdir(path)


# --- Threads of their own, and state that stays -----------------------------------------


class Bulk:
    """Something that a function has at hand; ``bulks`` says which of them still exist."""


bulks: weakref.WeakSet[Bulk] = weakref.WeakSet()


def _bulk() -> Bulk:
    bulk = Bulk()
    bulks.add(bulk)
    return bulk


def _raise_with_bulk() -> None:
    bulk = _bulk()
    raise ValueError(f"with {type(bulk).__name__} at hand")


@task
def hold_and_return() -> None:
    calls.append(len(bulks))
    bulk = _bulk()
    assert bulk in bulks


@task
def hold_and_fail() -> None:
    _raise_with_bulk()


@task
async def hold_and_return_async() -> None:
    bulk = _bulk()
    await asyncio.sleep(0)
    assert bulk in bulks


@task
async def hold_and_fail_async() -> None:
    bulk = _bulk()
    await asyncio.sleep(0)
    raise ValueError(f"with {type(bulk).__name__} at hand")


@task
async def hold_and_fail_in_a_thread() -> None:
    await sync_to_async(_raise_with_bulk)()


@task(timeout_seconds=60)
async def hold_and_sleep_async() -> None:
    bulk = _bulk()
    await asyncio.sleep(60)
    assert bulk in bulks


@task
def hold_and_fail_in_a_loop() -> None:
    asyncio.run(hold_and_fail_async.func())


@task
def hold_and_fail_in_a_bridged_loop() -> None:
    async_to_sync(hold_and_fail_async.func)()


@task(atomic=True, timeout_seconds=2)
def hold_and_fail_atomically() -> None:
    _raise_with_bulk()


pool = ThreadPoolExecutor(1, "outlives jobs")


def _in_loop(call: Callable[[], Any]) -> Any:
    return asyncio.run(sync_to_async(call)())


def _in_any_thread_of_a_loop(call: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.to_thread(call))


def _insensitively(call: Callable[[], Any]) -> Any:
    return asyncio.run(sync_to_async(call, thread_sensitive=False)())


def _in_thread(call: Callable[[], Any]) -> Any:
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.append(call()))
    thread.start()
    thread.join()
    return returned[0]


LANES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "bridge": lambda call: async_to_sync(sync_to_async(call))(),
    "loop": _in_loop,
    "any thread of a loop": _in_any_thread_of_a_loop,
    "not thread-sensitive": _insensitively,
    "thread": _in_thread,
    "thread of a thread": lambda call: _in_thread(lambda: _in_thread(call)),
    "loop in a thread": lambda call: _in_thread(lambda: _in_loop(call)),
    "pool": lambda call: pool.submit(call).result(),
    "pool in a thread": lambda call: _in_thread(lambda: pool.submit(call).result()),
}
"""Ways in which a function has something done in a thread that is not its own."""


@task
def leave_open_in(lane: str) -> None:
    LANES[lane](leave_atomic_open.func)


@task
async def leave_open_async(sensitive: bool) -> None:
    await sync_to_async(leave_atomic_open.func, thread_sensitive=sensitive)()


@task
def create_group_in(lane: str, name: str) -> None:
    LANES[lane](lambda: Group.objects.create(name=name))


@task
async def create_group_async(name: str, sensitive: bool) -> None:
    create = sync_to_async(Group.objects.create, thread_sensitive=sensitive)
    await create(name=name)


@task
def note_job_in(lane: str) -> None:
    calls.append(LANES[lane](current_context))


@task
def wait_in(lane: str) -> None:
    LANES[lane](lambda: (calls.append("waits"), gate.wait(WAIT_SECONDS)))


@task
def lend_connection() -> bool:
    """Let another thread work in the transaction of this one, as Django's own live server does."""
    lent = connections["default"]
    lent.inc_thread_sharing()
    with transaction.atomic():
        _in_thread(lambda: (setattr(connections._connections, "default", lent), lent.cursor()))
        return lent.connection is not None and lent.in_atomic_block


ODD_STATE = {
    "sqlite": (
        "PRAGMA foreign_keys = OFF",
        "CREATE TEMP TABLE left_behind (id integer)",
        "ATTACH DATABASE ':memory:' AS attached",
        "PRAGMA query_only = ON",
    ),
    "postgresql": (
        "CREATE SCHEMA IF NOT EXISTS tenant",
        "CREATE TABLE IF NOT EXISTS tenant.auth_group (LIKE auth_group INCLUDING ALL)",
        "CREATE TABLE IF NOT EXISTS tenant.relay_queue_job (LIKE relay_queue_job INCLUDING ALL)",
        "CREATE TEMP TABLE left_behind (id integer)",
        "SELECT pg_advisory_lock(4711)",
        "SET search_path = tenant, public",
        "SET TIME ZONE 'Asia/Kathmandu'",
        "SET statement_timeout = '5s'",
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    ),
}
"""What a function may do to the session of its connection."""

STATE = {
    "sqlite": (
        "PRAGMA foreign_keys",
        "SELECT count(*) FROM sqlite_temp_master",
        "SELECT count(*) FROM pragma_database_list WHERE name = 'attached'",
        "PRAGMA query_only",
    ),
    "postgresql": (
        "SELECT to_regclass('pg_temp.left_behind')::text",
        "SELECT count(*) FROM pg_locks WHERE objid = 4711 AND pid = pg_backend_pid()",
        "SHOW search_path",
        "SHOW time zone",
        "SHOW statement_timeout",
        "SHOW default_transaction_read_only",
    ),
}
"""Statements that show it."""


@task
def leave_odd_state(lane: str = "") -> None:
    LANES.get(lane, lambda call: call())(_leave_odd_state)


def _leave_odd_state() -> None:
    with connection.cursor() as cursor:
        for statement in ODD_STATE[connection.vendor]:
            cursor.execute(statement)
    connection.execute_wrappers.append(_refuse)


def _refuse(*args: Any) -> Any:
    raise ValueError("a wrapper that was left behind")


@task
def note_state(lane: str = "") -> None:
    calls.append(LANES.get(lane, lambda call: call())(_state))
    note.enqueue("found by every worker")


def _state() -> list[Any]:
    with connection.cursor() as cursor:
        seen = []
        for statement in STATE[connection.vendor]:
            cursor.execute(statement)
            seen.append(cursor.fetchone()[0])
    return seen


@task(takes_context=True)
def tell_slot(context: RelayContext) -> None:
    """Note the slot of a schedule that this run is for."""
    calls.append(context.slot)
