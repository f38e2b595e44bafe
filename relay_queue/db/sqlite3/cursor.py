"""The cursor: statements outside a transaction pass the gate, one by one, if they may write.

In doubt a statement counts as a write. A needless gate costs microseconds; a missing one costs
another process its turn.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

from django.db.backends.sqlite3.base import SQLiteCursorWrapper
from django.db.transaction import TransactionManagementError

from relay_queue.db.sqlite3.permits import PermitHolder

# What may stand before the first word of a statement.
_LEADING = re.compile(r"(?:\s+|;|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")
_WRITES = re.compile(r"\b(?:INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)
_PRAGMA = re.compile(
    r"PRAGMA\s+(?:[\"\[`]?\w+[\"\]`]?\s*\.\s*)?(?P<name>\w+)\s*(?P<value>[=(])?", re.IGNORECASE
)

# fmt: off
# These read, or set something of this connection only, with or without a value.
_HARMLESS_PRAGMAS = frozenset({
    "analysis_limit", "automatic_index", "busy_timeout", "cache_size", "cache_spill",
    "case_sensitive_like", "cell_size_check", "checkpoint_fullfsync", "collation_list",
    "compile_options", "data_version", "database_list", "defer_foreign_keys",
    "foreign_key_check", "foreign_key_list", "foreign_keys", "fullfsync", "function_list",
    "hard_heap_limit", "ignore_check_constraints", "index_info", "index_list", "index_xinfo",
    "integrity_check", "journal_size_limit", "legacy_alter_table", "mmap_size", "module_list",
    "pragma_list", "query_only", "quick_check", "read_uncommitted", "recursive_triggers",
    "reverse_unordered_selects", "shrink_memory", "soft_heap_limit", "synchronous",
    "table_info", "table_list", "table_xinfo", "temp_store", "threads", "trusted_schema",
    "wal_autocheckpoint",
})

# These read the database without a value and write it with one.
_READING_PRAGMAS = frozenset({
    "application_id", "auto_vacuum", "encoding", "freelist_count", "journal_mode",
    "locking_mode", "max_page_count", "page_count", "page_size", "schema_version",
    "secure_delete", "user_version",
})
# fmt: on

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


def is_read_only(sql: str) -> bool:
    """Say whether ``sql``, one statement, is known not to write the database file."""
    # The ORM writes its queries like this; do not fill the cache with them.
    return sql.startswith("SELECT ") or _is_read_only(sql)


@lru_cache(maxsize=512)
def _is_read_only(sql: str) -> bool:
    start = _LEADING.match(sql)
    statement = sql[start.end() :] if start else sql
    word = _WORD.match(statement)
    match word.group().upper() if word else "":
        case "SELECT" | "VALUES" | "EXPLAIN":
            return True
        case "WITH":
            # Looks inside strings and names too, which can only err on the safe side.
            return _WRITES.search(statement) is None
        case "PRAGMA":
            return _is_harmless_pragma(statement)
    return False


def _is_harmless_pragma(statement: str) -> bool:
    found = _PRAGMA.match(statement)
    if found is None:
        return False
    name = found["name"].lower()
    return name in _HARMLESS_PRAGMAS or (name in _READING_PRAGMAS and found["value"] is None)
