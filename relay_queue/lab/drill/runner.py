"""Executes rows side by side, each in a process and a folder of its own."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from relay_queue.lab.drill.results import PROMISES, Result
from relay_queue.lab.processes import started
from relay_queue.lab.project import variables
from relay_queue.lab.server import Server

MOST_SECONDS: Final = 100.0
"""When a row that does not end is ended: later than it gives up by itself."""

SLOW_FIRST: Final = ("F9", "F14", "F13", "F15", "F5", "F7")
"""Rows to begin with, so that none of them is left alone at the end."""

CONNECTIONS: Final = 12
"""What a row takes of a server's connections at most: those of two workers, and of the process that watches."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where rows are executed: in a folder, and on a server if there is one.

    The names of all its databases there begin with ``prefix``.
    """

    directory: Path
    server: Server | None = None
    prefix: str = ""

    def at_once(self) -> int:
        """Return how many rows to execute side by side: they mostly wait, but start many processes.

        One at a time where a server has no more connections to give: it may have others to serve.
        """
        most = max(2, min(6, 2 * (os.cpu_count() or 1)))
        if self.server is None:
            return most
        return max(1, min(most, self.server.free_connections() // CONNECTIONS))

    def excuse(self, row: str) -> str:
        """Return why a row does not apply here; empty if it does."""
        return PROMISES[row].not_on_server if self.server else ""


@dataclass(slots=True)
class _Playing:
    """A row under way."""

    row: str
    process: subprocess.Popen[bytes]
    until: float
    said: bytes = b""
    leave: ExitStack = field(default_factory=ExitStack)


def play(rows: Sequence[str], site: Site) -> Generator[Result]:
    """Execute rows and yield what came of each as it ends.

    Closing the iterator, or an exception in its consumer, ends the processes of all of them.
    """
    yield from (Result(row, reason=site.excuse(row)) for row in rows if site.excuse(row))
    waiting = [row for row in rows if not site.excuse(row)]
    waiting.sort(key=lambda row: SLOW_FIRST.index(row) if row in SLOW_FIRST else 99)
    at_once = site.at_once()
    with selectors.DefaultSelector() as selector, ExitStack() as everything:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < at_once:
                playing = _start(waiting.pop(0), site)
                everything.push(playing.leave)
                assert playing.process.stdout is not None
                selector.register(playing.process.stdout, selectors.EVENT_READ, playing)
            for playing in _ended(selector):
                yield _result(playing)


def _start(row: str, site: Site) -> _Playing:
    place = site.directory / row
    place.mkdir()
    leave = ExitStack()
    database = f"{site.prefix}_{row.lower()}"
    if site.server is not None:
        # The process makes and drops it, unless it has to be killed.
        leave.callback(site.server.drop, database)
    named = variables("drill", place, site.server, database)
    process = leave.enter_context(started(["drill", row], place, named))
    return _Playing(row, process, time.monotonic() + MOST_SECONDS, leave=leave)


def _ended(selector: selectors.BaseSelector) -> list[_Playing]:
    """Read what rows say; return those that have said all, or have had their time."""
    ended = []
    for key, _ in selector.select(timeout=1.0):
        chunk = os.read(key.fd, 65_536)
        key.data.said += chunk
        if not chunk:
            ended.append(key)
    now = time.monotonic()
    ended += [
        key for key in selector.get_map().values() if key.data.until < now and key not in ended
    ]
    for key in ended:
        selector.unregister(key.fileobj)
    return [key.data for key in ended]


def _result(playing: _Playing) -> Result:
    """End the process of a row and return what it said."""
    late = playing.until < time.monotonic()
    playing.leave.close()
    try:
        return Result.of(json.loads(playing.said))
    except ValueError:
        code = playing.process.returncode
        why = "had not ended in time" if late else f"ended with exit code {code}"
        return Result(playing.row, fault=f"the process that executes the row {why}")
