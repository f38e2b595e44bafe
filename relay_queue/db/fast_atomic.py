"""Django's ``atomic`` in fewer steps, for code that opens thousands of blocks a second.

The rules, the hooks and the savepoints inside are Django's own. Only the way in and the way out of a
block that succeeds are shorter. Django's go through a cursor with its layers and set the autocommit
mode twice, which costs more than SQLite's BEGIN and COMMIT.
"""

from __future__ import annotations

from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic

SHORTENED: Final = frozenset(
    {
        "_cursor",
        "chunked_cursor",
        "commit",
        "connect",
        "create_cursor",
        "cursor",
        "ensure_connection",
        "make_cursor",
        "make_debug_cursor",
        "rollback",
        "set_autocommit",
        "temporary_connection",
    }
)
"""The methods of a connection that the short ways leave out, or that guards of tests replace."""

_django_cursor = BaseDatabaseWrapper.cursor


def is_watched(connection: BaseDatabaseWrapper) -> bool:
    """Return whether somebody wants to see each statement, or to refuse it.

    That is the query log, a wrapper as of ``assertNumQueries``, or whatever has replaced a method
    of the connection. Django's test cases replace ``cursor`` where a test may not use the database.
    Then all statements must go through Django's own cursor, BEGIN and COMMIT included.
    """
    return (
        connection.queries_logged
        or bool(connection.execute_wrappers)
        or (not vars(connection).keys().isdisjoint(SHORTENED) and _has_replaced(connection))
        or type(connection).cursor is not _django_cursor
    )


def _has_replaced(connection: BaseDatabaseWrapper) -> bool:
    """Say whether a method is really another one: a guard that is taken away leaves the class's."""
    own, kind = vars(connection), type(connection)
    return any(
        getattr(own[name], "__func__", None) is not getattr(kind, name)
        for name in SHORTENED & own.keys()
    )


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
