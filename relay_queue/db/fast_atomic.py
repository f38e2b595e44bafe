"""Django's ``atomic`` in fewer steps, for code that opens thousands of blocks a second.

The rules, the hooks and the savepoints inside are Django's own. Only the way in and the way out of a
block that succeeds are shorter. Django's go through a cursor with its layers and set the autocommit
mode twice, which costs more than SQLite's BEGIN and COMMIT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.transaction import Atomic

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def is_watched(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the query log or a wrapper, as of ``assertNumQueries``, wants each statement.

    Then all statements must go through Django's own cursor, BEGIN and COMMIT included.
    """
    return connection.queries_logged or bool(connection.execute_wrappers)


class FastAtomic(Atomic):
    """``with FastAtomic(connection):``, the outermost block of a connection in autocommit mode.

    This class keeps Django's account of the transaction and sends nothing. The caller sends BEGIN
    first and COMMIT last, or a subclass does so in ``__enter__`` and `commit`.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        super().__init__(connection.alias, savepoint=True, durable=True)
        self._connection: Any = connection

    def __enter__(self) -> Any:
        """Note that a transaction is open."""
        self._connection.ensure_connection()
        self.note_begin()

    def note_begin(self) -> None:
        """Set what Django's ``atomic`` sets when a transaction has begun."""
        db = self._connection
        db.commit_on_exit = True
        db.needs_rollback = False
        db.autocommit = False
        db.in_atomic_block = True
        db.atomic_blocks.append(self)

    def commit(self) -> None:
        """Commit. Does nothing here: the caller has sent COMMIT already."""

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        """Commit, or roll back as Django does."""
        db = self._connection
        # A savepoint that is left belongs to a block inside that was entered and never left.
        odd = db.needs_rollback or db.closed_in_transaction or db.savepoint_ids
        if exc_type is not None or odd:
            super().__exit__(exc_type, exc_value, traceback)
            return
        db.atomic_blocks.pop()
        db.in_atomic_block = False
        try:
            self.commit()
        finally:
            db.autocommit = True
        db.errors_occurred = False
        if db.run_on_commit:
            db.run_and_clear_commit_hooks()
