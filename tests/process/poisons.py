"""Functions that go wrong in every way that leaves their process alive, by name."""

from __future__ import annotations

import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from django.contrib.auth.models import Group
from django.db import connection, transaction

from relay_queue.backoff import Backoff
from relay_queue.context import RelayContext
from relay_queue.task import task
from tests.process.chores import leave, wait_for
from tests.tasks import POISON, Unequal, _raise_recursion

AT_ONCE = Backoff(base_seconds=0.01, max_seconds=0.01)
HUGE_CHARS = 50_000_000
MEASURE_SECONDS = 1.5


def _raise(kind: str) -> Callable[[], Any]:
    def poison() -> None:
        raise POISON[kind]()

    return poison


def _shout() -> None:
    raise ValueError("x" * HUGE_CHARS)


def _leave_atomic() -> None:
    transaction.atomic().__enter__()
    Group.objects.create(name="never committed")


def _leave_savepoint() -> None:
    outer, inner = transaction.atomic(), transaction.atomic()
    outer.__enter__()
    inner.__enter__()
    Group.objects.create(name="never committed either")
    raise ValueError("two blocks deep")


def _close_connection() -> None:
    Group.objects.exists()
    connection.close()


def _close_in_atomic() -> None:
    with transaction.atomic():
        Group.objects.create(name="closed upon")
        connection.close()


def _start_threads() -> None:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(0.5,)).start()


def _replace_handlers() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _turn_warnings_into_errors() -> None:
    warnings.simplefilter("error")


def _return_unstorable_text() -> str:
    return "\ud800 and \x00"


KINDS: dict[str, Callable[[], Any]] = {
    **{name: _raise(name) for name in POISON},
    "recursion": _raise_recursion,
    "50 MB": _shout,
    "open atomic": _leave_atomic,
    "open savepoint": _leave_savepoint,
    "closed connection": _close_connection,
    "closed in atomic": _close_in_atomic,
    "threads": _start_threads,
    "handlers": _replace_handlers,
    "warnings": _turn_warnings_into_errors,
    "no JSON": lambda: {1},
    "odd object": Unequal,
    "no number": lambda: float("nan"),
    "too large": lambda: "x" * 2_000_000,
    "surrogate result": _return_unstorable_text,
}


@task(takes_context=True, backoff=AT_ONCE)
def poison(context: RelayContext, effects: str, kind: str) -> Any:
    leave(effects, context, "ran")
    return KINDS[kind]()


@task(takes_context=True, backoff=AT_ONCE)
async def poison_asynchronously(context: RelayContext, effects: str, kind: str) -> Any:
    leave(effects, context, "ran")
    return KINDS[kind]()


# --- Keeping the interpreter ----------------------------------------------------------------


def _match_regex(size: int) -> None:
    re.match(r"(a+)+$", "a" * (16 + size) + "b")


def _raise_to_power(size: int) -> None:
    _ = 7 ** (100_000 << size)


BUSY: dict[str, Callable[[int], None]] = {"regex": _match_regex, "power": _raise_to_power}


@task(takes_context=True, backoff=AT_ONCE)
def compute(context: RelayContext, effects: str, kind: str, until: str) -> None:
    """Run C code that no other Python thread can interrupt, for longer and longer."""
    leave(effects, context, "began")
    size, took = 0, 0.0
    while context.attempt == 1 and took < MEASURE_SECONDS:
        began = time.monotonic()
        BUSY[kind](size)
        took, size = time.monotonic() - began, size + 1
    if context.attempt == 1:
        wait_for(until)
    leave(effects, context, "ended")
