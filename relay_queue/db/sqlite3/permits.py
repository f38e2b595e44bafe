"""The connection's side of the gate: when it takes the permit to write, and when it gives it back.

`PermitHolder` is the connection, and `ImmediateAtomic` the block that takes the permit before it begins.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from django.db import DatabaseError, Error
from django.db.backends.sqlite3 import base
from django.db.transaction import Atomic

from relay_queue.db import replaced
from relay_queue.db.fast_atomic import FastAtomic, is_watched
from relay_queue.db.gate import GateTimeout, Permit, gate_of

DEFAULT_TIMEOUT_SECONDS = 20.0


class _Ungated:
    """The permit of a database that has no gate: it marks that a transaction is open."""

    def release(self) -> None:
        """Nothing to give back."""


UNGATED = _Ungated()


class PermitHolder(base.DatabaseWrapper):
    """Django's SQLite connection, able to hold the permit of its database's gate.

    ``permit`` is held exactly while this connection is in a transaction, and around each
    write outside of one. ``timeout_seconds`` is how long it waits for the gate by default.
    """

    permit: Permit | _Ungated | None = None
    timeout_seconds = DEFAULT_TIMEOUT_SECONDS

    def take_permit(self, timeout_seconds: float | None = None, *, first: bool = False) -> float:
        """Wait for the gate, by default as long as the connection waits; return the seconds.

        ``first`` goes ahead of the other threads of this process. Raises
        ``sqlite3.OperationalError`` as SQLite's own lock does.
        """
        if self.permit is not None:
            return 0.0
        gate = gate_of(self)
        if gate is None:
            self.permit = UNGATED
            return 0.0
        if timeout_seconds is None:
            timeout_seconds = self.timeout_seconds
        try:
            permit = gate.acquire(timeout_seconds, first=first)
        except GateTimeout as timeout:
            error = sqlite3.OperationalError(f"database is locked ({timeout})")
            # So that callers can tell by the code, as with an error of SQLite itself.
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            error.sqlite_errorname = "SQLITE_BUSY"
            raise error from timeout
        try:
            replaced.check(self)
        except BaseException:
            permit.release()
            self.close_at = 0.0  # a connection that Django keeps open ends with this request
            raise
        self.permit = permit
        return permit.waited_seconds

    def immediate(self, timeout_seconds: float | None, *, first: bool = False) -> ImmediateAtomic:
        """Return an outermost atomic block that begins as a writer; see `ImmediateAtomic`."""
        return ImmediateAtomic(self, timeout_seconds, first=first)

    def drop_permit(self) -> None:
        """Let the gate go, if this connection holds it."""
        permit = self.permit
        if permit is not None:
            if isinstance(permit, Permit):
                replaced.note_log(self, permit.gate.note_log)
            permit.release()
            self.permit = None

    def drop_permit_unless_in_transaction(self) -> None:
        """Let the gate go, unless SQLite is in a transaction that may write."""
        if self.permit is not None and not self.in_transaction():
            self.drop_permit()

    def transaction_lost(self, error: BaseException) -> None:
        """SQLite rolled back by itself, as on a full disk: so must the atomic block."""
        self.drop_permit()
        if self.in_atomic_block:
            self.needs_rollback = True
            self.rollback_exc = error

    def in_transaction(self) -> bool:
        """Whether SQLite is in a transaction; False too if the connection was closed."""
        try:
            return self.connection is not None and self.connection.in_transaction
        except sqlite3.ProgrammingError:  # closed behind Django's back
            return False


class ImmediateAtomic(FastAtomic):
    """An atomic block: ``with ImmediateAtomic(connection, 5.0, first=True) as waited_seconds:``

    Waits for the gate at most ``timeout_seconds`` (None: as long as the connection waits), then
    begins with the write lock. Raises ``OperationalError`` when the time is over. It must be the
    outermost block of a connection in autocommit mode.
    """

    def __init__(
        self, connection: PermitHolder, timeout_seconds: float | None, *, first: bool = False
    ) -> None:
        super().__init__(connection)
        self._timeout_seconds = timeout_seconds
        self._first = first
        self._short = False

    def __enter__(self) -> float:  # type: ignore[override]
        """Begin, and return the seconds that the wait for the gate took."""
        db = self._connection
        db.ensure_connection()  # also if there is one: a test runner's guard may stand here
        with db.wrap_database_errors:
            waited: float = db.take_permit(self._timeout_seconds, first=self._first)
        # A watcher of the statements, such as the query log, must see BEGIN and COMMIT, too.
        self._short = not is_watched(db)
        try:
            if self._short:
                with db.wrap_database_errors:
                    db.connection.execute("BEGIN IMMEDIATE")
                self.note_begin()
            else:
                self._begin_watched()
        except BaseException:
            db.drop_permit()
            raise
        return waited

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        """Commit, or roll back as Django does."""
        leave = super().__exit__ if self._short else super(FastAtomic, self).__exit__
        leave(exc_type, exc_value, traceback)

    def commit(self) -> None:
        """Commit through the driver, and let the gate go whether it succeeds or not."""
        db = self._connection
        try:
            with db.wrap_database_errors:
                db.connection.commit()
        except DatabaseError:
            try:
                db.rollback()
            except Error:
                db.close()  # a connection that cannot even roll back is of no use
            raise
        finally:
            db.drop_permit_unless_in_transaction()

    def _begin_watched(self) -> None:
        # A deferred transaction may find at its first write that its snapshot is stale. SQLite then
        # refuses at once and no timeout helps.
        db = self._connection
        mode, db.transaction_mode = db.transaction_mode, "IMMEDIATE"
        try:
            Atomic.__enter__(self)
        finally:
            db.transaction_mode = mode
