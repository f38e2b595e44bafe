"""The rings of PostgreSQL, and a worker's own session that hears them and proves the worker alive.

One connection does both, since both end with it. When it is lost, a thread opens the next one, so
that the loop never waits for a server that does not answer. Until then the worker does not hold its
lock, and must not claim.
"""

from __future__ import annotations

import os
import selectors
import threading
from typing import TYPE_CHECKING, Any, LiteralString

from django.db import connections

from relay_queue.db.inherited import keep_from_children
from relay_queue.logs import get_logger

if TYPE_CHECKING:
    import psycopg

logger = get_logger("relay_queue.worker")

# The table's own number. With it, two queues in two schemas of one database do not wake each other.
# It is the same for every process, on any search path that finds the table.
FIND_CHANNEL = "SELECT 'relay_queue_' || 'relay_queue_job'::regclass::oid"
"""The name of the queue's channel."""

NOTIFY = "SELECT pg_notify('relay_queue_' || 'relay_queue_job'::regclass::oid, '')"
"""Wake all sessions that listen on the queue's channel."""

CONNECT_PARAMETERS: dict[str, Any] = {
    "connect_timeout": 5,
    "fallback_application_name": "relay worker session",
    # A host that vanished without closing is noticed by both ends in about 20 seconds.
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Unless OPTIONS of the alias say otherwise."""

TUNE: LiteralString = """
    SELECT set_config(s.name, wanted.value, false)
    FROM (VALUES ('statement_timeout', '0'), ('idle_session_timeout', '0'),
                 ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '5'),
                 ('tcp_keepalives_count', '3')) AS wanted (name, value)
    JOIN pg_settings s ON s.name = wanted.name
    WHERE pg_backend_pid() = %s
"""
"""Keep the session although it idles, and let the server notice soon that we are gone.

Only a session that is ours: a pooler tells its clients process numbers of its own. It would hand
these settings on to other clients.
"""

END_OLD: LiteralString = """
    SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE pid = %s AND locktype = 'advisory' AND objsubid = 1 AND granted
      AND (classid::bigint << 32) | objid::bigint = %s
      AND (pg_backend_pid() = %s OR pid <> pg_backend_pid() AND state = 'idle')
"""
"""End our last session where the server has not noticed that it is over: it still has our lock.

Behind a pooler another client may be at work in it, or it may be the one that we have now.
"""

BOUND_WAIT: LiteralString = "SET LOCAL lock_timeout = '2s'"
"""Bound the wait for the lock, in this transaction only."""

LOCK: LiteralString = "SELECT pg_advisory_lock(%s)"
"""Take the lock that proves this worker alive. A prober may hold it for a moment."""

FIND_PID: LiteralString = "SELECT pg_backend_pid()"
"""The server's process behind the connection."""

POOLED = (
    "A pooler stands between this worker and PostgreSQL. That is well if it keeps one server "
    "connection for each client. Else the worker hears no notification, and its death may stay "
    'unproven: let it connect directly, or set RELAY["WAKEUP"] to "poll".'
)

MAX_DELAY_SECONDS = 1.0


def notify(using: str) -> None:
    """Wake the workers by a notification on the queue's channel. Never raises: a caller that has
    committed would enqueue again.

    It is sent after the commit, in a transaction of its own. In the caller's, PostgreSQL would let
    only one such commit at a time through, its flush to the disk included. Measured with 8 producers,
    that was 900 commits a second instead of 3,000. A transaction that only notifies flushes nothing.
    Sending works through a transaction-pooling proxy, too; hearing does not.
    """
    try:
        with connections[using].cursor() as cursor:
            cursor.execute(NOTIFY)
    except Exception:
        logger.debug("Nobody was notified on alias %r", using, exc_info=True)


class Session:
    """The session of one worker process; it belongs to the loop's thread.

    Only `_dial` runs in another thread, and hands over what it has opened.
    """

    def __init__(self, using: str, lock_key: int) -> None:
        """Connect, take the lock and listen. Raises the database's error."""
        self.regained = False
        """Whether the lock was lost and taken again. The caller that acts on it sets it back."""
        self._using = using
        self._lock_key = lock_key
        self._closing = threading.Event()
        self._handover = threading.Lock()
        self._dialled: psycopg.Connection[Any] | None = None
        self._line: psycopg.Connection[Any] | None = None
        self._server_pid: int | None = None
        with connections[using].wrap_database_errors:
            line = self._open()
        if self._server_pid != line.info.backend_pid:
            logger.warning(POOLED)  # a pooler tells its clients numbers of its own
        # The descriptor of epoll or kqueue can itself be waited for. So the loop waits for one
        # descriptor, while connections come and go.
        self._selector: Any = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._selector.register(self._reader, selectors.EVENT_READ)
        self._adopt(line)

    @property
    def held(self) -> bool:
        """Whether this worker holds its lock, as far as it knows."""
        return self._line is not None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a ring, or when the connection ends."""
        return int(self._selector.fileno())

    def clear(self) -> int:
        """Take the pending rings and return how many; a new connection counts as one."""
        rings = self._take_over()
        if self._line is None:
            return rings
        try:
            self._line.pgconn.consume_input()
            while self._line.pgconn.notifies():
                rings += 1
        except self._line.Error as error:
            self._lose(self._line, error)
        return rings

    def release(self) -> None:
        """End the session, and with it the lock. May be called twice."""
        with self._handover:
            if self._closing.is_set():
                return
            self._closing.set()
        for line in (self._line, self._dialled):
            if line is not None:
                line.close()
        self._line = None
        self._selector.close()
        os.close(self._reader)
        os.close(self._writer)

    close = release

    def _open(self) -> psycopg.Connection[Any]:
        # Imported here: only who uses PostgreSQL has the driver.
        import psycopg

        wanted = connections[self._using].get_connection_params()
        for own in ("context", "cursor_factory", "prepare_threshold"):
            wanted.pop(own, None)
        line = psycopg.connect(**{**CONNECT_PARAMETERS, **wanted}, autocommit=True)
        # A child that outlives the worker would keep the dead worker's lock.
        keep_from_children(line)
        try:
            told_pid = line.info.backend_pid
            line.execute(TUNE, [told_pid])
            if self._server_pid is not None:
                line.execute(END_OLD, [self._server_pid, self._lock_key, told_pid])
            with line.transaction():
                line.execute(BOUND_WAIT)
                line.execute(LOCK, [self._lock_key])  # the session's: it outlasts the transaction
            (self._server_pid,) = line.execute(FIND_PID).fetchone() or (None,)
            (channel,) = line.execute(FIND_CHANNEL).fetchone() or ("",)
            line.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(channel)))
        except BaseException:
            line.close()
            raise
        return line

    def _adopt(self, line: psycopg.Connection[Any]) -> None:
        self._line = line
        # Noted now: a connection that has ended cannot be asked.
        self._descriptor = line.fileno()
        self._selector.register(self._descriptor, selectors.EVENT_READ)

    def _take_over(self) -> int:
        """Take the connection that the other thread has opened, if there is one."""
        if self._dialled is None:
            return 0
        with self._handover:
            line, self._dialled = self._dialled, None
            os.read(self._reader, 16)  # written under the lock, so it is there
        self._adopt(line)
        self.regained = True
        logger.warning("The worker's session with the database is open again.")
        return 1

    def _lose(self, line: psycopg.Connection[Any], error: Exception) -> None:
        logger.warning("The worker's session with the database is lost: %s", error)
        self._line = None
        self._selector.unregister(self._descriptor)  # by number: the driver has closed it
        line.close()
        threading.Thread(target=self._dial, name="relay-session", daemon=True).start()

    def _dial(self) -> None:
        """Open the next connection, however long that takes."""
        delay = 0.0
        while not self._closing.wait(delay):
            try:
                line = self._open()
            except Exception as error:  # noqa: BLE001 - any error; the next try may succeed
                logger.debug("No new session yet: %s", error)
                delay = min(MAX_DELAY_SECONDS, delay * 2 or 0.05)
                continue
            with self._handover:
                if self._closing.is_set():
                    line.close()
                    return
                self._dialled = line
                os.write(self._writer, b"!")
            return
