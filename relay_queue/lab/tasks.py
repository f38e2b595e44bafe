"""The functions that the workers of scratch projects run. Most leave a line in the journal.

They are tasks where the lab is an installed app, which it is in scratch projects alone. In any other
project they are plain functions: a job that names one of them becomes a dead letter. A writer of the
tables can name any path, and Relay must not offer functions that no project has chosen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from django.conf import settings
from django.utils import timezone

from relay_queue.backoff import Backoff
from relay_queue.context import RelayContext
from relay_queue.exceptions import Fatal
from relay_queue.lab.project import BEGAN, ENDED, TOLD, note
from relay_queue.lab.settings import DIRECTORY_VARIABLE
from relay_queue.task import RelayTask
from relay_queue.task import task as relay_task

MOST_SECONDS: Final = 60.0
"""How long a function waits for its file, so that it does not stay for ever."""

LOOK_SECONDS: Final = 0.01
AT_ONCE: Final = Backoff(0.01, 0.01)

KILLED_WRITER: Final = "of the killed writer"
"""Marks the orders of `pay` that a program enqueues before it kills itself."""


def task(**options: Any) -> Callable[[Callable[..., Any]], RelayTask[..., Any]]:
    """Make a task in a scratch project, and leave the function as it is in any other."""
    if "relay_queue.lab" in settings.INSTALLED_APPS:
        return cast(Callable[..., RelayTask[..., Any]], relay_task(**options))
    return cast(Callable[..., RelayTask[..., Any]], lambda function: function)


# -- of bench


@task()
def noop() -> None:
    """Do nothing: what is left is the cost of the queue."""


@task()
def moment() -> int:
    """Return the monotonic clock in nanoseconds. On Linux all processes share it."""
    return time.monotonic_ns()


# -- of the drill; some are of demo and bench, too


@task(takes_context=True)
def finish(context: RelayContext) -> None:
    """Run, and be done."""
    note(ENDED, context.job)


@task(takes_context=True)
def pay(context: RelayContext, order: str) -> None:
    """Stand for work with an argument that matters."""
    note(ENDED, context.job)


@task(takes_context=True, backoff=AT_ONCE)
def wait(context: RelayContext, until: str) -> str:
    """Run until a file exists, deaf to any wish that it should stop."""
    note(BEGAN, context.job)
    _wait_for(until)
    note(ENDED, context.job)
    return f"attempt {context.attempt}"


@task(takes_context=True, backoff=AT_ONCE)
def wait_first_time(context: RelayContext, until: str) -> str:
    """Wait in the first attempt only."""
    note(BEGAN, context.job)
    if context.attempt == 1:
        _wait_for(until)
    note(ENDED, context.job)
    return f"attempt {context.attempt}"


@task(takes_context=True, backoff=AT_ONCE)
def wait_and_return_much(context: RelayContext, until: str, size: int) -> str:
    """Run until a file exists and return a text for which the database has to grow."""
    note(BEGAN, context.job)
    _wait_for(until)
    note(ENDED, context.job)
    return "x" * size


@task(takes_context=True, backoff=AT_ONCE)
def wait_politely(context: RelayContext) -> str:
    """Wait until told to stop, and return all the same."""
    note(BEGAN, context.job)
    give_up = time.monotonic() + MOST_SECONDS
    while not context.cancelled and time.monotonic() < give_up:
        time.sleep(LOOK_SECONDS)
    note(TOLD if context.cancelled else ENDED, context.job)
    return "too late"


@task(takes_context=True, backoff=AT_ONCE)
def fail(context: RelayContext, times: int) -> str:
    """Fail in the first attempts."""
    note(BEGAN, context.job)
    if context.attempt <= times:
        raise ConnectionError(f"no answer to attempt {context.attempt}")
    return f"attempt {context.attempt}"


@task(takes_context=True, atomic=True, timeout_seconds=2, backoff=AT_ONCE)
def write_together(context: RelayContext, until: str) -> None:
    """Write a row in the transaction of the ack; the first attempt stays in it."""
    write_a_session(f"attempt {context.attempt}")
    note(BEGAN, context.job)
    if context.attempt == 1:
        _wait_for(until)


# -- of the demo


@task(takes_context=True)
def send_mail(context: RelayContext, to: str) -> str:
    """Take a moment, as a mail server would."""
    note(BEGAN, context.job)
    time.sleep(0.15)
    return f"sent to {to}"


@task(takes_context=True, queue_name="mail")
def deliver(context: RelayContext, mailbox: str) -> str:
    """Put a letter into a mailbox; without the mailbox no attempt can succeed."""
    note(BEGAN, context.job)
    if not _path(mailbox).exists():
        raise Fatal(f"there is no mailbox {mailbox!r}")
    return "delivered"


@task(takes_context=True, queue_name="reports")
def export(context: RelayContext, seconds: float) -> int:
    """Work for a while and return the epoch of the attempt, which tells whose result was kept."""
    note(BEGAN, context.job)
    time.sleep(seconds)
    return context.epoch


def write_a_session(key: str) -> None:
    """Write a row of a table that is not Relay's."""
    # Other projects that import this module need not have sessions.
    from django.contrib.sessions.models import Session

    Session.objects.create(session_key=key, session_data="", expire_date=timezone.now())


def _wait_for(name: str) -> None:
    path = _path(name)
    give_up = time.monotonic() + MOST_SECONDS
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{path} was not made")
        time.sleep(LOOK_SECONDS)


def _path(name: str) -> Path:
    return Path(os.environ[DIRECTORY_VARIABLE]) / name
