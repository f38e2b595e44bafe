"""An outermost atomic block in fewer steps that waits for the gate and begins as a writer."""

from __future__ import annotations

from typing import Any

from django.db import DatabaseError, Error
from django.db.transaction import Atomic

from relay_queue.db.fast_atomic import FastAtomic, is_watched
from relay_queue.db.sqlite3.permits import PermitHolder


class ImmediateAtomic(FastAtomic):
    """``with ImmediateAtomic(connection, 5.0, first=True) as waited_seconds:``

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

    def __enter__(self) -> float:
        """Begin, and return the seconds that the wait for the gate took."""
        db = self._connection
        if db.connection is None:
            db.ensure_connection()
        with db.wrap_database_errors:
            waited: float = db.take_permit(self._timeout_seconds, first=self._first)
        # Whoever watches the statements, as the query log does, must see BEGIN and COMMIT, too.
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
