"""The functions that the demo's workers run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from relay_queue.backoff import Backoff
from relay_queue.cli.demo import scratch
from relay_queue.context import RelayContext
from relay_queue.exceptions import Fatal
from relay_queue.scratch import journal
from relay_queue.task import task

MOST_CRAWL_SECONDS: Final = 30.0
SLICE_SECONDS: Final = 0.02


@task(takes_context=True)
def send_mail(context: RelayContext, to: str) -> str:
    """Take a moment, as a mail server would."""
    _note("started", context)
    time.sleep(0.15)
    return f"sent to {to}"


@task(takes_context=True, max_attempts=4, backoff=Backoff(0.4, 5.0))
def call_partner(context: RelayContext, failures: int) -> str:
    """Fail in the first ``failures`` attempts."""
    _note("started", context)
    if context.attempt <= failures:
        raise ConnectionError(f"the partner did not answer call {context.attempt}")
    return "answered"


@task(takes_context=True, queue_name="mail")
def deliver(context: RelayContext, mailbox: str) -> str:
    """Put a letter into a mailbox; without the mailbox no attempt can succeed."""
    _note("started", context)
    if not (_directory() / mailbox).exists():
        raise Fatal(f"there is no mailbox {mailbox!r}")
    return "delivered"


@task(takes_context=True, queue_name="reports")
def export(context: RelayContext, seconds: float) -> int:
    """Work for a while and return the epoch of the attempt, which tells whose result was kept."""
    _note("started", context)
    time.sleep(seconds)
    return context.epoch


@task(takes_context=True, queue_name="reports")
def crawl(context: RelayContext) -> str:
    """Work until told to stop, and come back with what there is."""
    _note("started", context)
    give_up = time.monotonic() + MOST_CRAWL_SECONDS
    while not context.cancelled and time.monotonic() < give_up:
        time.sleep(SLICE_SECONDS)
    if context.cancelled:
        _note("told to stop", context)
    return "half of it"


def _directory() -> Path:
    return Path(os.environ[scratch.VARIABLE])


def _note(event: str, context: RelayContext) -> None:
    journal.write(str(_directory()), event, context.job)
