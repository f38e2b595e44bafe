"""Faults inside of a worker: ``python -m relay_queue.lab.faults FAULT PLACE COMMAND …``.

Prepares this process by the hooks of a tick and by the clock, then runs a management command in it.
What is put in place before the workers are forked is in place in each of them. A fault strikes while
its file exists; those that end the process remove the file first, so that only one is ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import django
from django.db import connections

from relay_queue import clock, conf
from relay_queue.worker.plan import HOOKS

_kept = ExitStack()
"""What stays in place to the end of the process."""


def jump_clock(path: str) -> None:
    """Read the wall clock as it is plus the seconds that stand in a file."""

    def jumped() -> datetime:
        seconds = 0.0
        with suppress(FileNotFoundError, ValueError):
            seconds = float(Path(path).read_text())
        return datetime.now(UTC) + timedelta(seconds=seconds)

    _kept.enter_context(clock.use(jumped))


def die_after_claim(path: str) -> None:
    """Die in the tick's transaction, after its claim and before its commit."""
    HOOKS["claimed"] = lambda done: _die_if_told(path) if done.claims else None


def die_after_settle(path: str) -> None:
    """Die in the tick's transaction, after outcomes were settled and before the commit."""
    HOOKS["settled"] = lambda done: _die_if_told(path) if done.settlements else None


def _die_if_told(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
        os.kill(os.getpid(), signal.SIGKILL)


def fill_disk(path: str) -> None:
    """Let the database file not grow: SQLite itself then says that the disk is full."""

    def bound(_plan: Any) -> None:
        connection = connections[conf.get().database]
        connection.ensure_connection()
        # SQLite takes the size it has for a limit that is smaller.
        most = 1 if os.path.exists(path) else MOST_PAGES
        connection.connection.execute(f"PRAGMA max_page_count = {most}").fetchall()

    HOOKS["begin"] = bound


MOST_PAGES: Final = 4_294_967_294
"""SQLite's own limit."""

FAULTS: Final[dict[str, tuple[Callable[[str], None], ...]]] = {
    "clock": (jump_clock,),
    "death": (die_after_claim, die_after_settle),
    "room": (fill_disk,),
}
"""What can be asked for. The file of each is named after its function."""


def main(fault: str, place: str, *command: str) -> None:
    """Prepare this process, then run a management command in it."""
    django.setup()
    for prepare in FAULTS[fault]:
        prepare(os.path.join(place, prepare.__name__))
    from django.core.management import execute_from_command_line

    execute_from_command_line(["manage.py", *command])


if __name__ == "__main__":
    main(*sys.argv[1:])
