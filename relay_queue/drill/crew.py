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

from relay_queue.drill import settings
from relay_queue.drill.result import Result
from relay_queue.scratch import dependent

MOST_SECONDS: Final = 100.0
"""When a row that does not end is ended: later than it gives up by itself."""

SLOW_FIRST: Final = ("F9", "F14", "F13", "F15", "F5", "F7")
"""Rows to begin with, so that none of them is left alone at the end."""


def at_once() -> int:
    """Return how many rows to execute side by side. They mostly wait, but start many processes."""
    return max(2, min(6, 2 * (os.cpu_count() or 1)))


@dataclass(slots=True)
class _Playing:
    """A row under way."""

    row: str
    process: subprocess.Popen[bytes]
    until: float
    said: bytes = b""
    leave: ExitStack = field(default_factory=ExitStack)


def play(rows: Sequence[str], directory: Path) -> Generator[Result]:
    """Execute rows and yield what came of each as it ends.

    Closing the iterator, or an exception in its consumer, ends the processes of all of them.
    """
    waiting = sorted(rows, key=lambda row: SLOW_FIRST.index(row) if row in SLOW_FIRST else 99)
    with selectors.DefaultSelector() as selector, ExitStack() as everything:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < at_once():
                playing = _start(waiting.pop(0), directory)
                everything.push(playing.leave)
                assert playing.process.stdout is not None
                selector.register(playing.process.stdout, selectors.EVENT_READ, playing)
            for playing in _ended(selector):
                yield _result(playing)


def _start(row: str, directory: Path) -> _Playing:
    place = directory / row
    place.mkdir()
    variables = {
        "DJANGO_SETTINGS_MODULE": settings.__name__,
        settings.VARIABLE: str(place),
    }
    leave = ExitStack()
    process = leave.enter_context(dependent.started("relay_queue.drill", [row], place, variables))
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
