"""An outermost atomic block in fewer steps, for code that opens thousands of them a second.

It is Django's own ``atomic`` with the same rules, hooks and savepoints inside. Only the way in and
the way out of a block that succeeds are shortened: Django's go through a cursor with its layers and
set the autocommit mode twice, which costs more than SQLite's BEGIN and COMMIT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, Error
from django.db.transaction import Atomic

from relay_queue.db.watched import is_watched

if TYPE_CHECKING:
    from relay_queue.db.sqlite3.base import DatabaseWrapper


class Immediate(Atomic):
    """``with Immediate(connection, 5.0, first=True) as waited_seconds:``

    Waits for the gate at most ``timeout_seconds`` (None: as long as the connection waits), then
    begins with the write lock. Raises ``OperationalError`` when the time is over. It must be the
    outermost block of a connection in autocommit mode.
    """

    def __init__(
        self, connection: DatabaseWrapper, timeout_seconds: float | None, *, first: bool = False
    ) -> None:
        super().__init__(connection.alias, savepoint=True, durable=True)
        self._connection = connection
        self._timeout_seconds = timeout_seconds
        self._first = first
        self._short = False

    def __enter__(self) -> float:  # type: ignore[override]
        """Begin, and return the seconds that the gate kept us waiting."""
        db = self._connection
        if db.connection is None:
            db.ensure_connection()
        with db.wrap_database_errors:
            waited = db.take_permit(self._timeout_seconds, first=self._first)
        # Whoever watches the statements, as the query log does, must see BEGIN and COMMIT, too.
        self._short = not is_watched(db)
        try:
            if self._short:
                self._begin(db)
            else:
                self._begin_watched(db)
        except BaseException:
            db.drop_permit()
            raise
        return waited

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        """Commit, or roll back as Django does."""
        db = self._connection
        # A savepoint that is left is a block inside that somebody did not leave.
        odd = db.needs_rollback or db.closed_in_transaction or db.savepoint_ids
        if not self._short or exc_type is not None or odd:
            super().__exit__(exc_type, exc_value, traceback)
            return
        db.atomic_blocks.pop()
        db.in_atomic_block = False
        try:
            self._commit(db)
        finally:
            db.autocommit = True
            db.drop_permit_unless_in_transaction()
        if db.run_on_commit:
            db.run_and_clear_commit_hooks()

    def _begin(self, db: DatabaseWrapper) -> None:
        with db.wrap_database_errors:
            db.connection.execute("BEGIN IMMEDIATE")
        db.commit_on_exit = True
        db.needs_rollback = False
        db.autocommit = False
        db.in_atomic_block = True
        db.atomic_blocks.append(self)

    def _begin_watched(self, db: DatabaseWrapper) -> None:
        # A deferred transaction may find at its first write that its snapshot is stale; SQLite then
        # refuses at once and no timeout helps.
        mode, db.transaction_mode = db.transaction_mode, "IMMEDIATE"
        try:
            super().__enter__()
        finally:
            db.transaction_mode = mode

    def _commit(self, db: DatabaseWrapper) -> None:
        try:
            with db.wrap_database_errors:
                db.connection.commit()
        except DatabaseError:
            try:
                db.rollback()
            except Error:
                db.close()  # a connection that cannot even roll back is of no use
            raise
        db.errors_occurred = False
