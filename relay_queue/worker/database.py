"""The loop's connection to the queue: what an error means, how the connection is opened again, what
is logged meanwhile.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from django.db import Error, connections

from relay_queue import conf, store, wakeup
from relay_queue.db.inherited import keep_from_children
from relay_queue.logs import get_logger
from relay_queue.store.dialects import dialect_for
from relay_queue.store.dialects.base import Trouble
from relay_queue.worker.pacing import Pace, Timers
from relay_queue.worker.plan import CLAIM, SETTLE

logger = get_logger("relay_queue.worker")

SLICE_SECONDS = 0.25
"""The longest that a tick waits for the writer before the loop looks after its time limits."""

MAX_DELAY_SECONDS = 1.0
"""The longest pause between two attempts to connect."""

STALL_SECONDS = 5.0
"""How long one turn's work with the database may take before its connection is cut."""

MAX_STALL_SECONDS = 60.0
LOOK_SECONDS = 1.0


class StallGuard:
    """Cuts a connection that does not answer, so that the loop goes on with its time limits.

    A network may drop everything without an error, and the system would wait for many minutes.
    After each cut the guard waits twice as long: a server that is only slow must get its work done.
    """

    def __init__(self) -> None:
        self.seconds = STALL_SECONDS
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
        thread = threading.Thread(target=self._watch, name="relay-stall-guard", daemon=True)
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

    def reset(self) -> None:
        """Note that the database did what it was asked to."""
        self.seconds = STALL_SECONDS

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            since, line = self._since, self._line
            if since is None or line is None or time.monotonic() - since < self.seconds:
                continue
            logger.warning("The database has not answered for %g s; reconnecting.", self.seconds)
            self.seconds = min(MAX_STALL_SECONDS, 2 * self.seconds)
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
        self._stall_guard = StallGuard()
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
            self.mark_lost(error)
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
        self._stall_guard.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End a turn's work with the database."""
        self._stall_guard.end()
        if kind is None and not self.lost:
            self._has_answered()
        self._connection.queries_log.clear()  # it grows for ever under DEBUG

    def diagnose(self, error: Exception) -> Trouble:
        """Say what an error means; see `Dialect.diagnose`."""
        if not isinstance(error, Error):
            return "data"  # it came before the commit, from what was read
        return self._dialect.diagnose(error)

    def mark_lost(self, error: Exception) -> None:
        """Drop the connection; it is opened again with ever longer pauses."""
        if not self._delay:
            logger.warning("The database is not reached: %s. Outcomes are kept.", error)
        self.lost = True
        with suppress(Error):  # a broken connection cannot be closed in order
            self._connection.close()
        self._retry_at = time.monotonic() + self._delay
        self._delay = min(MAX_DELAY_SECONDS, self._delay * 2 or 0.05)

    def _has_answered(self) -> None:
        # Not when a connection opens: a standby accepts it, and refuses every statement on it.
        if self._delay:
            logger.warning("The database is reached again.")
        self._delay = 0.0
        self._stall_guard.reset()
        self._watch()

    def ring(self) -> None:
        """Wake the other workers, unless that needs a connection that is not there."""
        if not self.lost:
            wakeup.ring(self._connection.alias)

    def renew(self) -> None:
        """Go on with a new connection, which prepares its statements again and reads anything.

        No commit is in doubt: what failed has been undone. See `Dialect.read_anything`.
        """
        with suppress(Error):
            self._connection.close()
        self._stale = True

    def close(self) -> None:
        """Stop watching the connection, and leave it open."""
        self._stall_guard.close()

    def _watch(self) -> None:
        """Let the guard know a connection that it has not seen: the store may open one, too."""
        raw = self._connection.connection
        if self._dialect.has_sessions and raw is not None and raw is not self._watched:
            with self._connection.wrap_database_errors:
                self._stall_guard.watch(raw.fileno())
            self._watched = raw


SAID_AGAIN_SECONDS = 10.0
MOST_SAID_AGAIN_SECONDS = 600.0
"""Pauses between two lines of the log on the same outage: the first, and the longest."""

BUSY_SECONDS = 5.0
"""How long another may hold the writer before it is worth a line."""


class Outage:
    """One wait for the database. It is logged once, then ever more rarely, and at its end."""

    def __init__(self, logger: logging.Logger) -> None:
        """Prepare to say it to ``logger``."""
        self._logger = logger
        self._since: float | None = None
        self._say_at = 0.0
        self._pause_seconds = SAID_AGAIN_SECONDS
        self._said = False

    def goes_on(self, error: object, trouble: Trouble = "lost") -> None:
        """Note that the database is still away, for this reason."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._say_at = now + (BUSY_SECONDS if trouble == "busy" else 0.0)
        if now < self._say_at:
            return
        self._logger.warning(
            "The database %s; waiting for it%s: %s",
            "is not reached" if trouble == "lost" else "takes no writes",
            f", {now - self._since:.0f} s so far" if now > self._since else "",
            " ".join(str(error).split()),
        )
        self._said = True
        self._say_at = now + self._pause_seconds
        self._pause_seconds = min(MOST_SAID_AGAIN_SECONDS, 2 * self._pause_seconds)

    def is_over(self) -> None:
        """Note that the database answers; said only if its absence was."""
        if self._said and self._since is not None:
            waited = time.monotonic() - self._since
            self._logger.warning("The database is reached after %.0f s.", waited)
        self._since, self._said, self._pause_seconds = None, False, SAID_AGAIN_SECONDS


FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 10.0
REASON_CHARACTERS = 160

READ = "read the tables"
COMMIT = "commit"
"""What can fail besides the steps of a tick."""

NEEDED_TO_CLAIM = frozenset({CLAIM, SETTLE, READ, COMMIT})
"""What must be possible before more jobs are claimed."""

EXIT_UNKNOWN = 70
"""Exit code after an error that leaves the outcome of a commit unknown."""

EXIT_REPLACED = 73
"""Exit code when another file is at the path of the database: a new process opens that one."""


class Hindrance:
    """The steps that fail though no job is at fault, until they pass again.

    The cause is a table, a right, a trigger.

    After the first failure the step is tried again at once: statements are prepared again by then,
    and a changed column needs no more. From the second failure on there is a ``reason``, and the
    pauses grow.
    """

    def __init__(self) -> None:
        self._faults: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._pause: float | None = None

    def __bool__(self) -> bool:
        """Whether anything fails."""
        return bool(self._faults)

    @property
    def reason(self) -> str:
        """What fails and why, in one line; empty if nothing does."""
        return "; ".join(f"cannot {step}: {why}" for step, why in self._said.items())

    def meet(self, faults: Mapping[str, Exception]) -> float:
        """Note what could not be done; return the seconds until it is to be tried again."""
        first = self._pause is None
        self._pause = min(MAX_PAUSE_SECONDS, 2 * (self._pause or FIRST_PAUSE_SECONDS / 2))
        if first:
            self._pause = 0.0
        for step, error in faults.items():
            why = self._faults[step] = in_one_line(error)
            if not first and self._said.get(step) != why:
                self._said[step] = why
                logger.error("Cannot %s: %s. No job is given up for that; trying on.", step, why)
        return self._pause

    def passed(self, steps: Iterable[str]) -> None:
        """Note what could be done again."""
        for step in steps:
            self._faults.pop(step, None)
            if self._said.pop(step, None) is not None:
                logger.warning("Can %s again.", step)
        if not self._faults:
            self._pause = None


class Failures:
    """What the loop does about errors: it waits, claims nothing, works row by row, or ends.

    ``careful`` asks for ticks that do each step and each row in a savepoint of its own.
    """

    def __init__(self, database: Database, timers: Timers, pace: Pace) -> None:
        self.careful = False
        self.hindrance = Hindrance()
        self._database = database
        self._timers = timers
        self._pace = pace

    def met(self, error: Exception, step: str) -> int | None:
        """Act by the cause of an error; return the exit code if the process must end.

        Nothing was committed, or the commit is unknown. Every outcome is kept.
        """
        trouble = self._database.diagnose(error)
        if trouble == "lost":
            self._database.mark_lost(error)
        elif trouble == "full":
            logger.error("No room for the database: %s. Claims stop; outcomes are kept.", error)
            self._timers.hold_claims(1.0)
        elif trouble in ("data", "tables") and not self.careful and step == COMMIT:
            why = in_one_line(error)
            logger.warning("Something cannot be stored or read: %s. One by one, then.", why)
            self.careful = True
            self._database.renew()
        elif trouble == "replaced":
            logger.critical("%s. The worker ends.", error)
            return EXIT_REPLACED
        elif trouble in ("data", "tables") and isinstance(error, store.UNREADABLE):
            self._hold({step: error})
        elif trouble != "busy":
            logger.critical("Nobody knows what was committed: %r. Exiting.", error, exc_info=error)
            return EXIT_UNKNOWN
        return None

    def left_undone(
        self, faults: Mapping[str, Exception], passed: set[str], *, claimed: bool
    ) -> None:
        """Note a committed tick: the steps that could be done, and those that could not."""
        self.careful = bool(self.hindrance)
        if faults:
            self._hold(faults, claimed=claimed)
        if self.hindrance:
            self.passed(COMMIT, *passed)

    def passed(self, *steps: str) -> None:
        """Note steps that could be done."""
        reason = self.hindrance.reason
        self.hindrance.passed(steps)
        self.careful = bool(self.hindrance)
        self._write_if_changed(reason)

    def _hold(self, faults: Mapping[str, Exception], *, claimed: bool = False) -> None:
        """No row is to blame: claim nothing for a while, keep all settlements, and try on."""
        reason = self.hindrance.reason
        pause = self.hindrance.meet(faults)
        self.careful = True
        self._database.renew()
        if READ in faults:
            self._timers.look_in(pause)
        if NEEDED_TO_CLAIM.isdisjoint(faults) or claimed:
            self._timers.hold_ticks(pause)
        else:
            self._timers.hold_claims(pause)
        self._pace.more = True
        self._write_if_changed(reason)

    def _write_if_changed(self, reason: str) -> None:
        if reason != self.hindrance.reason:
            self._timers.write_soon()


def in_one_line(error: Exception) -> str:
    """Return an error's class and the first line of what it says."""
    # A server adds details with the values of the row, which do not belong into a worker's log.
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:REASON_CHARACTERS]
