"""The functions that the drill's workers run. Each leaves a line in the journal."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from django.contrib.sessions.models import Session
from django.utils import timezone

from relay_queue.backoff import Backoff
from relay_queue.context import RelayContext
from relay_queue.drill.settings import VARIABLE
from relay_queue.scratch import journal
from relay_queue.task import task

MOST_SECONDS: Final = 60.0
"""How long a function waits for its file, lest it stays for ever."""

LOOK_SECONDS: Final = 0.01
AT_ONCE: Final = Backoff(0.01, 0.01)

BEGAN: Final = "began"
ENDED: Final = "ended"
TOLD: Final = "told to stop"


@task(takes_context=True)
def note(context: RelayContext) -> None:
    """Run, and be done."""
    _say(ENDED, context)


@task(takes_context=True)
def pay(context: RelayContext, order: str) -> None:
    """Stand for work with an argument that matters."""
    _say(ENDED, context)


@task(takes_context=True, backoff=AT_ONCE)
def wait(context: RelayContext, until: str) -> str:
    """Run until a file exists, deaf to any wish that it should stop."""
    _say(BEGAN, context)
    _wait_for(until)
    _say(ENDED, context)
    return f"attempt {context.attempt}"


@task(takes_context=True, backoff=AT_ONCE)
def wait_first_time(context: RelayContext, until: str) -> str:
    """Wait in the first attempt only."""
    _say(BEGAN, context)
    if context.attempt == 1:
        _wait_for(until)
    _say(ENDED, context)
    return f"attempt {context.attempt}"


@task(takes_context=True, backoff=AT_ONCE)
def wait_and_return_much(context: RelayContext, until: str, size: int) -> str:
    """Run until a file exists and return a text for which the database has to grow."""
    _say(BEGAN, context)
    _wait_for(until)
    _say(ENDED, context)
    return "x" * size


@task(takes_context=True, backoff=AT_ONCE)
def wait_politely(context: RelayContext) -> str:
    """Wait until told to stop, and return all the same."""
    _say(BEGAN, context)
    give_up = time.monotonic() + MOST_SECONDS
    while not context.cancelled and time.monotonic() < give_up:
        time.sleep(LOOK_SECONDS)
    _say(TOLD if context.cancelled else ENDED, context)
    return "too late"


@task(takes_context=True, backoff=AT_ONCE)
def fail(context: RelayContext, times: int) -> str:
    """Fail in the first attempts."""
    _say(BEGAN, context)
    if context.attempt <= times:
        raise ConnectionError(f"no answer to attempt {context.attempt}")
    return f"attempt {context.attempt}"


@task(takes_context=True, backoff=Backoff(1.0, 300.0))
def fail_with_a_pause(context: RelayContext) -> None:
    """Fail once, with a back-off of a second."""
    _say(BEGAN, context)
    if context.attempt == 1:
        raise ConnectionError("no answer to attempt 1")


@task(takes_context=True, atomic=True, timeout_seconds=2, backoff=AT_ONCE)
def write_together(context: RelayContext, until: str) -> None:
    """Write a row in the transaction of the ack; the first attempt stays in it."""
    Session.objects.create(
        session_key=f"attempt {context.attempt}", session_data="", expire_date=timezone.now()
    )
    _say(BEGAN, context)
    if context.attempt == 1:
        _wait_for(until)


def _wait_for(name: str) -> None:
    path = Path(_directory()) / name
    give_up = time.monotonic() + MOST_SECONDS
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"nobody made {path}")
        time.sleep(LOOK_SECONDS)


def _directory() -> str:
    return os.environ[VARIABLE]


def _say(event: str, context: RelayContext) -> None:
    journal.write(_directory(), event, context.job)
