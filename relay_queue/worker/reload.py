"""``runworker --reload``: a new supervisor with fresh code whenever a file changes.

Django's own reloader runs its program in a thread, where nothing may fork. So this process only
watches, with Django's list of files, and runs the supervisor as a program of its own.
"""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from django.apps import apps
from django.utils import autoreload

from relay_queue.logs import get_logger
from relay_queue.worker.logwriter import log_writer
from relay_queue.worker.options import DRAIN, QUIT
from relay_queue.worker.processes import SignalSource

logger = get_logger("relay_queue.supervisor")

LOOK_SECONDS: Final = 1.0
# A developer waits for the new code: jobs that run longer are handed back, uncharged.
PATIENCE_SECONDS: Final = 5.0
PARENT_OPTION: Final = "--parent-fd"
"""Option of ``runworker`` that names the socket to this process."""


class CodeWatch:
    """Tells whether a source file, template or translation of the project has changed."""

    def __init__(self) -> None:
        self._files = autoreload.StatReloader()
        for config in apps.get_app_configs():
            # Task modules are imported when a job names them, so their files may not be known yet.
            if "site-packages" not in Path(config.path).parts:
                self._files.watch_dir(Path(config.path), "**/*.py")
        # Django's own receivers add the directories of templates and translations.
        autoreload.autoreload_started.send(sender=self._files)
        self._seen: dict[Path, float] = dict(self._files.snapshot_files())

    def changed(self) -> Path | None:
        """Return a file that has changed since the last call, or None."""
        now: dict[Path, float] = dict(self._files.snapshot_files())
        before, self._seen = self._seen, now
        return next((path for path, at in now.items() if before.get(path, at) != at), None)


class Reloader:
    """Keeps one supervisor program running, and replaces it when the code changes."""

    def __init__(self, command: list[str], watch: CodeWatch) -> None:
        """Prepare to run ``command``, to which the option for the socket is added."""
        self._command = command
        self._watch = watch
        self._stop_signals = 0
        self._stopping = False
        self._hurry_at: float | None = None
        self._look_at = 0.0
        self._waiting_for_change = False

    def run(self) -> int:
        """Run until told to stop; return the exit code of the last supervisor."""
        with SignalSource() as signals, selectors.DefaultSelector() as selector:
            selector.register(signals, selectors.EVENT_READ)
            self._start()
            try:
                while True:
                    if selector.select(LOOK_SECONDS):
                        self._on_signals(signals.read())
                    code = self._process.poll()
                    if self._ended(code):
                        return code or 0
                    self._step(code)
            finally:
                self._orders.close()

    def _start(self) -> None:
        self._orders, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [*self._command, PARENT_OPTION, str(descriptor)], pass_fds=[descriptor]
            )

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            self._stopping = True
            # A terminal signals the supervisor as well; it does not count this order as another.
            second = number != signal.SIGHUP and self._stop_signals
            self._tell(QUIT if second else DRAIN)
            self._stop_signals += number != signal.SIGHUP

    def _ended(self, code: int | None) -> bool:
        """Say whether all is over: told to stop, or nothing was left to do."""
        if code is None:
            return self._stopping and self._waiting_for_change
        return self._stopping or (code == 0 and self._hurry_at is None)

    def _step(self, code: int | None) -> None:
        now = time.monotonic()
        if self._hurry_at is not None:
            self._replace(code, now)
        elif now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look(code, now)

    def _replace(self, code: int | None, now: float) -> None:
        """Start the new supervisor once the old one has ended; hurry it when it is slow."""
        assert self._hurry_at is not None
        if code is not None:
            self._hurry_at = None
            self._orders.close()
            self._start()
        elif now >= self._hurry_at:
            self._tell(QUIT)
            self._hurry_at = float("inf")  # the supervisor itself kills what does not obey

    def _look(self, code: int | None, now: float) -> None:
        path = self._watch.changed()
        if path is not None:
            logger.warning("%s has changed; starting the workers again", path)
            self._waiting_for_change = False
            self._hurry_at = now + PATIENCE_SECONDS
            self._tell(DRAIN)
        elif code is not None and not self._waiting_for_change:
            logger.error("The supervisor ended with exit code %d; waiting for a change", code)
            self._waiting_for_change = True

    def _tell(self, order: bytes) -> None:
        try:
            self._orders.send(order)
        except OSError:
            logger.debug("The supervisor has ended already")


def run() -> int:
    """Run this very command line as a supervisor, and again whenever the code changes."""
    command = [str(part) for part in autoreload.get_child_arguments()]
    log_writer.take_over()
    return Reloader(command, CodeWatch()).run()
