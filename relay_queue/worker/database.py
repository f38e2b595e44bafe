"""The loop's connection to the queue: what an error on it means, and how it is opened again."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from django.db import Error, connections

from relay_queue import conf, wakeup
from relay_queue.db.inherited import keep_from_children
from relay_queue.store.dialects import dialect_for
from relay_queue.store.dialects.base import Trouble
from relay_queue.worker.tick import SLICE_SECONDS

logger = logging.getLogger("relay_queue.worker")

MAX_DELAY_SECONDS = 1.0
"""The longest pause between two attempts to connect."""

PATIENCE_SECONDS = 5.0
"""How long one turn's work with the database may take before its connection is cut."""

MAX_PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 1.0


class Patience:
    """Cuts a connection that does not answer, so that the loop goes on with its time limits.

    A network may swallow everything without a word, and the system would wait for many minutes.
    After each cut it waits twice as long: a server that is only slow must get its work done.
    """

    def __init__(self) -> None:
        self.seconds = PATIENCE_SECONDS
        self._line: socket.socket | None = None
        self._since: float | None = None
        self._ended = threading.Event()

    def watch(self, descriptor: int) -> None:
        """Watch the connection with this descriptor instead of the last one."""
        first, last = self._line is None, self._line
        # A copy of its own: the number may belong to another file by the time of the cut.
        self._line = socket.socket(fileno=os.dup(descriptor))
        keep_from_children(self._line)
        if last is not None:
            last.close()
        if first:
            self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._watch, name="relay-patience", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no thread, which costs no job
            logger.error("A connection that does not answer will not be cut: %s.", error)
            if self._line is not None:
                self._line.close()
            self._line = None

    def begin(self) -> None:
        """Note that the loop begins to work with the database."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Note that the loop is back."""
        self._since = None

    def satisfied(self) -> None:
        """Note that the database did what it was asked to."""
        self.seconds = PATIENCE_SECONDS

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            since, line = self._since, self._line
            if since is None or line is None or time.monotonic() - since < self.seconds:
                continue
            logger.warning("The database has not answered for %g s; reconnecting.", self.seconds)
            self.seconds = min(MAX_PATIENCE_SECONDS, 2 * self.seconds)
            self._since = None
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        if self._line is not None:
            self._line.close()


class Database:
    """The loop's connection. ``reopened`` is called after each time that it was lost."""

    def __init__(self, reopened: Callable[[], None]) -> None:
        self.lost = False
        self._connection = connections[conf.get().database]
        self._dialect = dialect_for(self._connection)
        self._reopened = reopened
        self._patience = Patience()
        self._retry_at = 0.0
        self._delay = 0.0
        self._watched: object = None
        self._stale = False

    def usable(self) -> bool:
        """Whether the connection is open; one that was lost is opened, if it is time to try."""
        if not (self.lost or self._stale):
            return True
        if self.lost and self.retry_in() > 0:
            return False
        try:
            self._connection.ensure_connection()
            self._dialect.limit_wait(self._connection, SLICE_SECONDS)
            if self._stale:
                self._dialect.read_anything(self._connection)
        except Error as error:
            self.lose(error)
            return False
        if self.lost:
            self.lost = False
            self._reopened()
        self._stale = False
        return True

    def retry_in(self) -> float:
        """Return how long to wait before the next attempt to connect."""
        return max(0.0, self._retry_at - time.monotonic())

    def __enter__(self) -> None:
        """Begin a turn's work with the database."""
        self._patience.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End a turn's work with the database."""
        self._patience.end()
        if kind is None and not self.lost:
            self._satisfied()
        self._connection.queries_log.clear()  # it grows for ever under DEBUG

    def diagnose(self, error: Exception) -> Trouble:
        """Say what an error means; see `Dialect.diagnose`."""
        if not isinstance(error, Error):
            return "data"  # it came before the commit, from what was read
        return self._dialect.diagnose(error)

    def lose(self, error: Exception) -> None:
        """Drop the connection; it is opened again with ever longer pauses."""
        if not self._delay:
            logger.warning("The database is not reached: %s. Outcomes are kept.", error)
        self.lost = True
        with suppress(Error):  # a broken connection need not part politely
            self._connection.close()
        self._retry_at = time.monotonic() + self._delay
        self._delay = min(MAX_DELAY_SECONDS, self._delay * 2 or 0.05)

    def _satisfied(self) -> None:
        # Not when a connection is open: a standby takes it, and refuses all that is asked there.
        if self._delay:
            logger.warning("The database is reached again.")
        self._delay = 0.0
        self._patience.satisfied()
        self._watch()

    def ring(self) -> None:
        """Wake the other workers, unless that needs a connection that is not there."""
        if not self.lost:
            wakeup.ring(self._connection.alias)

    def renew(self) -> None:
        """Go on with a new connection, whose statements are prepared anew and which reads anything.

        Nothing is in doubt: what failed has been undone. See `Dialect.read_anything`.
        """
        with suppress(Error):
            self._connection.close()
        self._stale = True

    def close(self) -> None:
        """Stop watching the connection, and leave it open."""
        self._patience.close()

    def _watch(self) -> None:
        """Let the patience know a connection that it has not seen: the store may open one, too."""
        raw = self._connection.connection
        if self._dialect.has_sessions and raw is not None and raw is not self._watched:
            with self._connection.wrap_database_errors:
                self._patience.watch(raw.fileno())
            self._watched = raw
