"""The demo's worker processes: ``runworker`` as anybody would start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from relay_queue.models import Worker
from relay_queue.worker.options import QUIT
from relay_queue.worker.reload import PARENT_OPTION

PROCESSES: Final = 3
CONCURRENCY: Final = 2
STOP_SECONDS: Final = 15.0
QUIT_SECONDS: Final = 3.0


class Workers:
    """One supervisor and its workers, in a process group of their own, logging to a file.

    The supervisor holds one end of a socket: should this process be killed, it stops by itself.
    """

    def __init__(self, directory: Path) -> None:
        self.log = directory / "worker.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def start(self) -> None:
        """Start them; they are ready a moment later."""
        self._line, theirs = socket.socketpair()
        arguments = ["--name", "demo", "--processes", str(PROCESSES)]
        arguments += ["--concurrency", str(CONCURRENCY), "--shutdown-timeout", "5"]
        arguments += [PARENT_OPTION, str(theirs.fileno())]
        with theirs, self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "django", "runworker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # Ctrl-C in the terminal is for the demo, which then stops them itself.
                start_new_session=True,
            )

    def alive(self) -> list[Worker]:
        """Return the workers that have registered and not been seen to end."""
        return list(Worker.objects.filter(stopped_at__isnull=True).order_by("id"))

    def ended(self) -> int | None:
        """Return the supervisor's exit code, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> int | None:
        """Ask them politely, as an init system does. Returns the exit code, None if none came."""
        if self._process is None:
            return None
        self._process.terminate()
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self, lines: int = 12) -> list[str]:
        """Return the end of their log."""
        if not self.log.exists():
            return []
        return self.log.read_text(errors="replace").splitlines()[-lines:]

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
