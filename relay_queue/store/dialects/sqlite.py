"""SQLite: one writer at a time, so the write lock taken at BEGIN is the only lock there is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, OperationalError, transaction

from relay_queue import clock
from relay_queue.db import replaced
from relay_queue.db.gate import Gate, GateTimeout, Permit, gate_of
from relay_queue.store.dialects.base import Dialect, Trouble, marks

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


class SQLiteDialect(Dialect):
    """The gate, BEGIN IMMEDIATE, the process's own clock, and text timestamps."""

    skip_locked = ""
    has_sessions = False
    lock_rows = ""
    clock = "NULL"
    each_count = (
        "json_each(CASE WHEN json_valid({column}) THEN"
        " CASE json_type({column}) WHEN 'object' THEN {column} ELSE '{{}}' END"
        " ELSE '{{}}' END) AS slot"
    )
    has_writable_ctes = False
    bounds_branches = False
    shard = "0"
    freeze_counts = ""
    freeze_queues = ""

    def begin(
        self,
        connection: BaseDatabaseWrapper,
        wait_seconds: float | None,
        *,
        first: bool,
        defer_begin: bool = False,
    ) -> AbstractContextManager[float]:
        """Win the gate, then BEGIN IMMEDIATE; see `Dialect.begin`."""
        if hasattr(connection, "immediate"):
            block: AbstractContextManager[float] = connection.immediate(wait_seconds, first=first)
            return block
        return _gated(connection, wait_seconds, first=first)

    def begin_by_hand(self, connection: BaseDatabaseWrapper) -> None:
        """Begin before the savepoint, which is a transaction of its own where there is none yet.

        Its release would be the commit, and a rollback by hand too late.
        """
        connection.ensure_connection()
        if not connection.connection.in_transaction:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN IMMEDIATE")

    def opened_at(self, connection: BaseDatabaseWrapper) -> datetime:
        """Read the clock: the gate and the write lock are won."""
        return clock.now()

    def now(self, connection: BaseDatabaseWrapper) -> datetime:
        """Read this machine's clock: all users of one SQLite file share it."""
        return clock.now()

    def to_db(self, moment: datetime) -> str:
        """Return the text that Django's DateTimeField stores: naive UTC."""
        if moment.tzinfo is not UTC:
            if moment.utcoffset() is None:
                raise ValueError(f"{moment!r} has no time zone")
            moment = moment.astimezone(UTC)
        return str(moment.replace(tzinfo=None))

    def from_db(self, value: Any) -> datetime:
        """Parse the text that Django's DateTimeField stores."""
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        return datetime.fromisoformat(f"{value}+00:00")

    def cursor(self, connection: BaseDatabaseWrapper) -> Any:
        """Open the engine's own cursor, without Django's layers."""
        return connection.create_cursor()

    def rows(self, count: int, casts: tuple[str, ...]) -> str:
        """Return the VALUES list; SQLite needs no casts."""
        return _rows(count, len(casts))

    def lookup(self, column: str, query: str) -> str:
        """Return nothing: SQLite always looks rows up by id."""
        return ""

    def row(self, casts: tuple[str, ...]) -> str:
        """Return the placeholders; SQLite needs no casts."""
        return marks(len(casts))

    def bind(self, params: list[Any], casts: tuple[str, ...]) -> list[Any]:
        """Return the values as they are: row by row."""
        return params

    def sql(self, statement: str) -> str:
        """Use sqlite3's own ``?``: Django's conversion costs more than many of the statements."""
        return _qmark(statement)

    def insert_many(
        self, cursor: Any, statement: str, rows: Iterable[Sequence[Any]], count: int
    ) -> list[int]:
        """Insert with one prepared statement; count the ids back from the last.

        The table is AUTOINCREMENT and we are the only writer, so each row's id is one more than
        that of the row before.
        """
        if not count:
            return []
        cursor.executemany(statement, rows)
        cursor.execute("SELECT last_insert_rowid()")
        last = int(cursor.fetchone()[0])
        return list(range(last - count + 1, last + 1))

    def diagnose(self, error: Exception) -> Trouble:
        """Read SQLite's own result code, which Python keeps on the cause of Django's error."""
        cause = error.__cause__
        if isinstance(cause, GateTimeout):
            return "busy"
        code = getattr(cause, "sqlite_errorcode", None)
        if code is None:
            return "data" if isinstance(error, DatabaseError) else "unknown"
        if code == sqlite3.SQLITE_READONLY_DBMOVED:
            return "replaced"
        if code == sqlite3.SQLITE_READONLY:
            return "tables"  # the file's rights; the extended codes say that it is another file
        return _TROUBLES.get(code & 0xFF, "data")

    def check_file(self, connection: BaseDatabaseWrapper) -> None:
        """Compare the file at the path with the one that is open."""
        with connection.wrap_database_errors:
            replaced.check(connection)

    def comes_back(self, error: Exception) -> bool:
        """Say so of a file that others hold, and of a full disk."""
        return self.diagnose(error) in ("busy", "full")

    def is_deadlock_victim(self, error: Exception) -> bool:
        """Say no: with one writer at a time there are no deadlocks."""
        return False

    def read_anything(self, connection: BaseDatabaseWrapper) -> None:
        """Decode in Python, which is slower than sqlite3's own way but never fails."""
        connection.ensure_connection()
        connection.connection.text_factory = partial(str, encoding="utf-8", errors="replace")

    def tune(self, connection: BaseDatabaseWrapper) -> None:
        """Nothing to do: SQLite stores all tables alike."""

    def limit_wait(self, connection: BaseDatabaseWrapper, seconds: float) -> None:
        """Set SQLite's busy timeout."""
        with connection.cursor() as cursor:
            cursor.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")


# The low byte is the primary result code. After an I/O error a commit may or may not be on disk.
# Work cannot go on with a corrupt file either, or with one that cannot be opened.
_TROUBLES: dict[int, Trouble] = {
    sqlite3.SQLITE_ERROR: "tables",  # no such table or column, or a statement that does not fit them
    sqlite3.SQLITE_PERM: "tables",
    sqlite3.SQLITE_AUTH: "tables",
    sqlite3.SQLITE_SCHEMA: "tables",
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "busy",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_IOERR: "unknown",
    sqlite3.SQLITE_CORRUPT: "unknown",
    sqlite3.SQLITE_NOTADB: "unknown",
    sqlite3.SQLITE_CANTOPEN: "unknown",
    sqlite3.SQLITE_READONLY: "unknown",
    sqlite3.SQLITE_NOMEM: "unknown",
}


@lru_cache(maxsize=1024)
def _rows(count: int, width: int) -> str:
    row = "(" + marks(width) + ")"
    return "VALUES " + ", ".join([row] * count)


@lru_cache(maxsize=1024)
def _qmark(statement: str) -> str:
    return statement.replace("%s", "?")


def _timeout(connection: BaseDatabaseWrapper) -> float:
    return float(connection.settings_dict["OPTIONS"].get("timeout", 5.0))


@contextmanager
def _gated(
    connection: BaseDatabaseWrapper, wait_seconds: float | None, *, first: bool
) -> Iterator[float]:
    """Take the gate for Django's own engine, which knows of none."""
    gate = gate_of(connection)
    if gate is None:
        with _immediate(connection):
            yield 0.0
        return
    try:
        permit = gate.acquire(
            _timeout(connection) if wait_seconds is None else wait_seconds, first=first
        )
    except GateTimeout as error:
        raise OperationalError(f"database is locked: {error}") from error
    with permit, _immediate(connection):
        # Within, since the block is what may connect.
        with connection.wrap_database_errors:
            replaced.check(connection)
        # Hooks of the commit must not run behind a closed gate: they may take long.
        transaction.on_commit(partial(_let_go, connection, gate, permit), using=connection.alias)
        yield permit.waited_seconds


def _let_go(connection: BaseDatabaseWrapper, gate: Gate, permit: Permit) -> None:
    replaced.note_log(connection, gate.note_log)
    permit.release()


@contextmanager
def _immediate(connection: Any) -> Iterator[None]:
    """Begin with the write lock, in any mode that the project has chosen for its own transactions.

    A deferred transaction that reads first may find, at its first write, that another commit made
    its snapshot stale; SQLite then refuses at once and no timeout helps.
    """
    mode = connection.transaction_mode
    connection.transaction_mode = "IMMEDIATE"
    try:
        with transaction.atomic(using=connection.alias):
            yield
    finally:
        connection.transaction_mode = mode
