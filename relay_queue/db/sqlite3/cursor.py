"""The cursor: statements outside a transaction pass the gate, one by one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from django.db.backends.sqlite3.base import SQLiteCursorWrapper
from django.db.transaction import TransactionManagementError

from relay_queue.db.sqlite3.permits import PermitHolder
from relay_queue.db.sqlite3.statements import is_read_only

_execute = sqlite3.Cursor.execute


class GatedCursor(SQLiteCursorWrapper):
    """Django's SQLite cursor, with the gate around every write.

    Inside a transaction the permit is held already and a statement costs two attribute looks
    more than with Django's cursor.
    """

    db: PermitHolder  # set by DatabaseWrapper.create_cursor
    _fetched: Iterator[Any] | None = None  # rows of a write, all read before the gate went

    def execute(self, query: str, params: Any = None) -> Any:
        """Run one statement."""
        self._fetched = None
        if self.db.permit is None:
            return self._run_gated(super().execute, is_read_only(query), query, params)
        if params is None or "%" in query:
            return self._run_inside(super().execute, query, params)
        # Nothing to convert: past Django's conversion, which asks more than this statement costs.
        try:
            result = _execute(self, query, params)
        except BaseException as error:
            self._notice_end(error)
            raise
        if not self.connection.in_transaction:
            self.db.drop_permit()
        return result

    def executemany(self, query: str, param_list: Any) -> Any:
        """Run one statement for each of ``param_list``."""
        self._fetched = None
        if self.db.permit is None:
            return self._run_gated(super().executemany, False, query, param_list)
        return self._run_inside(super().executemany, query, param_list)

    def executescript(self, sql_script: str) -> Any:
        """Run a script. Python commits an open transaction before it."""
        self._fetched = None
        if self.db.permit is None:
            return self._run_gated(super().executescript, False, sql_script)
        return self._run_inside(super().executescript, sql_script)

    def fetchone(self) -> Any:
        """Return the next row or None."""
        return super().fetchone() if self._fetched is None else next(self._fetched, None)

    def fetchmany(self, size: int | None = None) -> list[Any]:
        """Return up to ``size`` (by default ``arraysize``) rows."""
        size = self.arraysize if size is None else size
        if self._fetched is None:
            return super().fetchmany(size)
        return list(islice(self._fetched, size))

    def fetchall(self) -> list[Any]:
        """Return the rows that are left."""
        return super().fetchall() if self._fetched is None else list(self._fetched)

    def __next__(self) -> Any:
        return super().__next__() if self._fetched is None else next(self._fetched)

    def close(self) -> None:
        """Close the cursor and forget its rows."""
        self._fetched = None
        super().close()

    def convert_query(self, query: str, *, param_names: list[str] | None = None) -> str:
        """Return the query in sqlite3's own style; at once if nothing in it needs converting."""
        if param_names is None and "%" not in query:
            return query
        return super().convert_query(query, param_names=param_names)

    def _run_inside(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run a statement of an open transaction and notice if that ended by it."""
        try:
            result = run(*args)
        except BaseException as error:
            self._notice_end(error)
            raise
        if not self.connection.in_transaction:
            self.db.drop_permit()
        return result

    def _notice_end(self, error: BaseException) -> None:
        """Look after a failed statement whether SQLite has rolled the transaction back."""
        if not self.db.in_transaction():
            self.db.transaction_lost(error)

    def _run_gated(self, run: Callable[..., Any], harmless: bool, *args: Any) -> Any:
        """Run a statement outside a transaction, behind the gate unless it is harmless."""
        db = self.db
        if db.in_atomic_block and db.commit_on_exit:
            # It would be committed at once and survive the block's rollback.
            raise TransactionManagementError(
                "The transaction of this atomic block has ended already: SQLite rolled it "
                "back after an error, or a statement of the block committed it. Leave the "
                "block before the next statement."
            )
        if harmless:
            return run(*args)
        db.take_permit()
        try:
            result = run(*args)
            if self.description is not None and not self.connection.in_transaction:
                # SQLite commits INSERT ... RETURNING with its last row, so read all of them
                # before the gate goes.
                self._fetched = iter(super().fetchall())
            return result
        finally:
            db.drop_permit_unless_in_transaction()
