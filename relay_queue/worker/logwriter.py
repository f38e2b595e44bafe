"""Log lines of the threads that must never wait: written by another thread.

A log is often a pipe. While no process reads it, a thread that writes to it waits. A loop that
waits renews no lease, and a supervisor that waits hears no order. So they hand their lines over.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Final

from relay_queue.logs import get_logger

logger = get_logger("relay_queue.worker")

MAX_LINES: Final = 1000
"""How many lines wait for a log that takes none. The lines beyond are counted and dropped."""

LOGGERS: Final = ("relay_queue", "django.db", "psycopg")
"""How the names of the loggers begin that the loop and the supervisor write to, if indirectly."""

JOB_THREADS: Final = "relay-slot"
"""How the names of the threads begin whose lines wait for the log: they hold up one slot only."""


class LogWriter(logging.Filter):
    """Takes the lines of `LOGGERS` and writes them in a thread that lives while there are any.

    It is a filter, because that is the first step of a line that may wait. Everything after it
    happens in the writing thread: handlers, their locks, what error reporters put around them. No
    thread is left once all is written, so that a supervisor can fork.
    """

    def __init__(self) -> None:
        super().__init__()
        self._on = False
        self.forget_parent()

    def take_over(self) -> None:
        """Take the lines of every one of `LOGGERS` that exists by now."""
        self._on = True
        for name, found in list(logging.root.manager.loggerDict.items()):
            if name.startswith(LOGGERS) and isinstance(found, logging.Logger):
                found.addFilter(self)

    def forget_parent(self) -> None:
        """Begin with no lines in a forked child: its parent writes those that wait."""
        self._lock = threading.Lock()
        self._lines: deque[logging.LogRecord] = deque()
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Let a line go on to the handlers if this thread may wait; else keep it. Never waits."""
        thread = threading.current_thread()
        if not self._on or thread is self._thread or thread.name.startswith(JOB_THREADS):
            return True
        with self._lock:
            if len(self._lines) >= MAX_LINES:
                self._dropped += 1
            else:
                self._lines.append(record)
            if self._thread is None:
                self._start()
        return False

    def written(self, seconds: float) -> bool:
        """Wait for at most ``seconds`` until all is written; say whether it is."""
        with self._lock:
            if self._thread is None and self._lines:
                self._start()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return not self._lines and (thread is None or not thread.is_alive())

    def finish(self, seconds: float) -> bool:
        """Wait as `written`; if all is written, let every later line go straight to the handlers."""
        done = self.written(seconds)
        self._on = self._on and not done
        return done

    def _start(self) -> None:
        thread = threading.Thread(target=self._write, name="relay-log", daemon=True)
        self._thread = thread  # before it runs: it knows itself by this
        try:
            thread.start()
        except RuntimeError:  # no room for a thread; the next line tries again
            self._thread = None

    def _write(self) -> None:
        while (record := self._next()) is not None:
            try:
                logging.getLogger(record.name).handle(record)
            except Exception:  # noqa: BLE001 - a handler that raises must not end the writing
                continue

    def _next(self) -> logging.LogRecord | None:
        with self._lock:
            if self._lines:
                return self._lines.popleft()
            dropped, self._dropped = self._dropped, 0
            if not dropped:
                self._thread = None
                return None
        text = "%d lines of this log were dropped: it took none, and %d waited already"
        return logger.makeRecord(
            logger.name, logging.WARNING, __file__, 0, text, (dropped, MAX_LINES), None
        )


log_writer = LogWriter()
"""The one of this process."""
