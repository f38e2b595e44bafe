"""Processes that do one piece of work for a command and end with it, whatever ends the command.

The command keeps their standard input open; its end is their order to leave.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from relay_queue.scratch import folder

STOP_SECONDS: Final = 30.0

# -- the command


@contextmanager
def started(
    module: str, arguments: Sequence[str], directory: Path, variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``python -m module``; at the end of the block nothing of it or its children is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": folder.python_path(),
            "PYTHONUNBUFFERED": "1",
            **variables,
        },
        cwd=directory,
        # A group of its own: Ctrl-C reaches us alone, and what is left at the end can be ended.
        start_new_session=True,
    )
    try:
        with process:
            try:
                yield process
            finally:
                end(process)
    finally:
        # As it should be, nobody is there: the process has stopped all that it started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def end(process: subprocess.Popen[bytes]) -> None:
    """Tell a process to leave, and wait for it; by force if it does not."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def leaving_when_told(*numbers: signal.Signals) -> Iterator[None]:
    """Turn the first of these signals into an exception, so that everything is cleaned up.

    Further ones are ignored: they must not stop the stopping. So is one that was ignored before, as
    under ``nohup``. Only the main thread may set it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def leave(number: int, _frame: FrameType | None) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = [signal.signal(number, leave) for number in heeded]
    try:
        yield
    finally:
        for number, handler in zip(heeded, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put off signals that would raise an exception in this block; they arrive at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    # Python runs handlers in the main thread whatever its mask, so the handlers are exchanged.
    before = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(handler := signal.getsignal(number))
    }
    for number in before:
        signal.signal(number, lambda number, _frame: heard.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for missed in heard:
            signal.raise_signal(missed)


# -- the process it has started


def leave_with_parent() -> None:
    """Leave by ``SystemExit`` when told to, and when the command that started this one is gone."""
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_watch_parent, daemon=True).start()


def _leave(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the stopping
    # An exception, so that every block on the way out stops what it has started.
    raise SystemExit(1)


def _watch_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
