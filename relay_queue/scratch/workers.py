"""Worker processes of a scratch project: ``runworker`` as anybody would start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from django.db import OperationalError

from relay_queue import store
from relay_queue.models import Worker
from relay_queue.worker.options import QUIT
from relay_queue.worker.reload import PARENT_OPTION

STOP_SECONDS: Final = 15.0
QUIT_SECONDS: Final = 3.0
WRITABLE_SECONDS: Final = 0.3
MOST_TRIES: Final = 100
"""To find a worker without the writer: it may be another who keeps it for so long, under load."""

DJANGO: Final = ("-m", "django")


class Workers:
    """One supervisor and its workers, in a process group of their own, logging to a file.

    The supervisor holds one end of a socket: should this process be killed, it stops by itself.
    """

    def __init__(self, log: Path, *arguments: str, program: Sequence[str] = DJANGO) -> None:
        """Plan workers; ``program`` is what Python runs in place of Django's own command line."""
        self.log = log
        self._arguments = [*program, "runworker", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def start(self) -> None:
        """Start them; they are ready a moment later."""
        self._line, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._arguments, PARENT_OPTION, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # Ctrl-C in the terminal is for the command, which then stops them itself.
                start_new_session=True,
            )

    def ended(self) -> int | None:
        """Return the supervisor's exit code, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def tell_to_stop(self) -> None:
        """Ask them politely, as an init system does."""
        if self._process is not None:
            self._process.terminate()

    def wait(self) -> int | None:
        """Wait for the supervisor's end. Returns its exit code, None if it did not come in time."""
        if self._process is None:
            return None
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the supervisor and its workers at once, as the end of a machine does."""
        if self._process is not None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def said(self) -> str:
        """Return their log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_words(self, lines: int = 12) -> list[str]:
        """Return the end of their log."""
        return self.said().splitlines()[-lines:]

    def close(self) -> None:
        """End whatever is left: at once, and by force if that does not help."""
        if self._process is None:
            return
        # One that is stopped can neither hear nor end.
        self._signal_group(signal.SIGCONT)
        if self._line is not None:
            with self._line, suppress(OSError):
                self._line.send(QUIT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(QUIT_SECONDS)
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        self._process = self._line = None

    def _signal_group(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def alive() -> list[Worker]:
    """Return the workers that have registered and not been seen to end, oldest first."""
    return list(Worker.objects.filter(stopped_at__isnull=True).order_by("id"))


def freeze(pid: int) -> None:
    """Stop a worker, but not while it holds the writer, or rows: everybody else would wait for it.

    Raises ``TimeoutError`` if it never lets them go.
    """
    for _ in range(MOST_TRIES):
        os.kill(pid, signal.SIGSTOP)
        try:
            with store.transaction(wait_seconds=WRITABLE_SECONDS) as tx:
                store.stand_alone(tx)
                return
        except OperationalError:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)  # time for the process to let the writer go
    raise TimeoutError(f"process {pid} never let the writer go")
