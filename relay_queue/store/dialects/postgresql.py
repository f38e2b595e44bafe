"""PostgreSQL: many writers at once, row locks that others pass over, and the server's clock."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from django.db import DatabaseError, InterfaceError, OperationalError, transaction
from psycopg import pq
from psycopg.conninfo import make_conninfo

from relay_queue import clock, conf
from relay_queue.db.fast_atomic import FastAtomic, is_watched
from relay_queue.store.dialects.base import Dialect, Trouble
from relay_queue.store.dialects.pg_cursor import STALE, PreparedCursor, array, numbered

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

SHARDS: Final = 1024
"""Counters of a queue and state: as many transactions may be open at once without waiting.

More than a server has connections. Sums read only the shards that were ever written, and those are as
many as transactions were open at the same time.
"""

SHARD_LOCKS: Final = 0x52_45_4C_59
"""The class of the advisory locks on shards. A project's own locks hardly use it."""

FREE_SHARD = f"""COALESCE(
    (SELECT shard FROM (SELECT generate_series(0, {SHARDS - 1}) AS shard) AS every
     WHERE pg_try_advisory_xact_lock({SHARD_LOCKS}, shard) LIMIT 1),
    mod(pg_backend_pid(), {SHARDS}))"""
"""The first shard that no other open transaction writes: so no two of them meet on a row.

The series stands in a list of columns, where it ends with the first that is free. In FROM all of it
would be made first.
"""

READ_CLOCK = "SELECT clock_timestamp()"
"""Read the server's clock, as it is now: ``now()`` stands still in a transaction."""

BOUND_WAITS = f"{READ_CLOCK}, set_config('lock_timeout', %s, true)"
"""The same, and bound every wait for a lock in this transaction."""

BOUND_WAITS_OF_SESSION = "SELECT set_config('lock_timeout', %s, false) WHERE pg_backend_pid() = %s"
"""Bound every wait of a session that is the client's own.

A pooler tells its clients process numbers of its own. The session may serve other clients next, and
what is set for all of it would be set for them.
"""

_FIXED_PLANS = {
    "plan_cache_mode": "force_generic_plan",
    **dict.fromkeys(
        (
            "enable_seqscan",
            "enable_bitmapscan",
            "enable_sort",
            "enable_hashjoin",
            "enable_mergejoin",
        ),
        "off",
    ),
    "jit": "off",
}
BEGIN_AS_WORKER = ", ".join(
    [
        BOUND_WAITS,
        *(f"set_config('{name}', '{value}', true)" for name, value in _FIXED_PLANS.items()),
    ]
)
"""The same for a worker's own. Its statements look up rows by index, in the index's order, and are
planned once. A plan that was made while a table was small must not stay when it has grown."""


UNTUNED = """
    SELECT relname FROM pg_class
    WHERE oid = ANY(SELECT to_regclass(name) FROM unnest(%s::text[]) AS name)
      AND reloptions IS NULL ORDER BY relname
"""
"""Find the tables for which it is not set how they are stored."""

_CHURNED = (
    "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, "
    "autovacuum_vacuum_insert_scale_factor = 0.05, "
    "autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 1000, "
    "autovacuum_vacuum_cost_delay = 0"
)
_UPDATED_IN_PLACE = (
    "fillfactor = 40, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500"
)

STORAGE: Final = {
    "relay_queue_job": f"fillfactor = 85, {_CHURNED}",
    "relay_queue_lease": f"fillfactor = 85, {_CHURNED}",
    "relay_queue_queuecount": _UPDATED_IN_PLACE,
    "relay_queue_queueminute": _UPDATED_IN_PLACE,
    "relay_queue_worker": _UPDATED_IN_PLACE,
}
"""Storage parameters. Each change of a job's state leaves a dead row and dead entries in indexes,
which claims walk over. With the server's own scale factor, a fifth of the table is dead before a
vacuum. Counters change no index, so with room on their page they leave nothing behind."""


class OutcomeUnknown(OperationalError):
    """The connection was lost while COMMIT was under way: it may have happened or not."""


class PostgreSQLDialect(Dialect):
    """Row locks, statements the server keeps prepared, arrays for many rows, and its clock."""

    skip_locked = " FOR UPDATE SKIP LOCKED"
    has_sessions = True
    lock_rows = " FOR UPDATE"
    clock = "clock_timestamp()"
    # A cast would raise for a text that is no JSON, and no version before 16 can be asked.
    each_count = (
        r"""jsonb_each_text(CASE WHEN {column} ~ '^\{{(\s*,?\s*"\d{{1,3}}":\s*\d{{1,15}})*\}}$'"""
        r""" THEN {column} ELSE '{{}}' END::jsonb) AS slot"""
    )
    has_writable_ctes = True
    bounds_branches = True
    shard = FREE_SHARD
    freeze_counts = "LOCK TABLE relay_queue_queuecount IN EXCLUSIVE MODE"
    freeze_queues = "LOCK TABLE relay_queue_queue IN ACCESS EXCLUSIVE MODE"

    def begin(
        self,
        connection: BaseDatabaseWrapper,
        wait_seconds: float | None,
        *,
        first: bool,
        defer_begin: bool = False,
    ) -> AbstractContextManager[float]:
        """Begin, and bound the waits for rows that others hold; see `Dialect.begin`."""
        return _own_transaction(connection, wait_seconds, first=first, defer_begin=defer_begin)

    def begin_by_hand(self, connection: BaseDatabaseWrapper) -> None:
        """Nothing to do: the driver begins before any statement."""

    def opened_at(self, connection: BaseDatabaseWrapper) -> datetime:
        """Return what the server's clock said as the transaction began."""
        with connection.wrap_database_errors:
            row = _cursor(connection).kept()
        assert row is not None, "nobody else asks, and a statement without FROM has one row"
        return clock.of_database(_in_utc(row[0]))

    def now(self, connection: BaseDatabaseWrapper) -> datetime:
        """Read the server's clock: the clocks of its clients may differ by minutes."""
        with connection.cursor() as cursor:
            cursor.execute(READ_CLOCK)
            return clock.of_database(_in_utc(cursor.fetchone()[0]))

    def to_db(self, moment: datetime) -> datetime:
        """Return the moment in UTC: the driver does the rest."""
        return _in_utc(moment)

    def from_db(self, value: Any) -> datetime:
        """Return a moment that was read as such, or as text."""
        return _in_utc(value if isinstance(value, datetime) else datetime.fromisoformat(value))

    def cursor(self, connection: BaseDatabaseWrapper) -> Any:
        """Open a cursor that sends values apart from the statement, which stays prepared.

        Not through a pooler that gives each transaction another server connection. A project says
        that it has one by Django's ``DISABLE_SERVER_SIDE_CURSORS``.
        """
        connection.ensure_connection()
        return _cursor(connection)

    def post(self, cursor: Any, statement: str, params: Sequence[Any]) -> None:
        """Send it with the next statement: each exchange that is spared is a wait less."""
        if isinstance(cursor, PreparedCursor):
            cursor.post(statement, params)
        else:  # Django's cursor, for a watcher of the statements
            cursor.execute(statement, params)

    def rows(self, count: int, casts: tuple[str, ...]) -> str:
        """Return a table of arrays: one statement for any number of rows."""
        return _unnest(casts)

    def lookup(self, column: str, query: str) -> str:
        """Return the condition by an array, which an index answers for all rows at once."""
        return f" AND {column} = ANY(ARRAY({query}))"

    def row(self, casts: tuple[str, ...]) -> str:
        """Return the placeholders, each with its type."""
        return ", ".join(f"%s::{cast}" for cast in casts)

    def bind(self, params: list[Any], casts: tuple[str, ...]) -> list[Any]:
        """Return one array a column."""
        width = len(casts)
        return [array(params[place::width], cast) for place, cast in enumerate(casts)]

    def sql(self, statement: str) -> str:
        """Number the placeholders, as the server does."""
        return numbered(statement)

    def insert_many(
        self, cursor: Any, statement: str, rows: Iterable[Sequence[Any]], count: int
    ) -> list[int | None]:
        """Send all rows at once, and collect the ids as they come back."""
        if not count:
            return []
        returning = f"{statement} RETURNING id"
        if isinstance(cursor, PreparedCursor):
            return [_only_id(row) for row in cursor.execute_each(returning, rows)]
        # Django's cursor, for a watcher of the statements
        return [_only_id((cursor.execute(returning, row) or cursor).fetchone()) for row in rows]

    def diagnose(self, error: Exception) -> Trouble:
        """Read the SQLSTATE. A lost connection undoes what was not being committed."""
        if isinstance(error, OutcomeUnknown):
            return "lost"
        state = getattr(error.__cause__, "sqlstate", None)
        if state is None:
            lost = isinstance(error, OperationalError | InterfaceError)
            return "lost" if lost else "data"
        if state == UNIQUE_VIOLATION and _is_of_sequence(error.__cause__):
            return "tables"
        return _TROUBLES.get(state) or _TROUBLE_CLASSES.get(state[:2], "data")

    def check_file(self, connection: BaseDatabaseWrapper) -> None:
        """Nothing to do: the server looks after its own files."""

    def comes_back(self, error: Exception) -> bool:
        """Read the SQLSTATE; where connecting failed there is none, so ask whether a server answers."""
        if self.diagnose(error) != "lost":
            return self.diagnose(error) in ("busy", "full")
        attempt = getattr(error.__cause__, "pgconn", None)
        if getattr(error.__cause__, "sqlstate", None) is not None or attempt is None:
            return True
        given = {one.keyword.decode(): one.val.decode() for one in attempt.info if one.val}
        # libpq's own question, which needs no name or password that the server knows.
        return pq.PGconn.ping(make_conninfo(**given).encode()) in _NOT_NOW

    def is_deadlock_victim(self, error: Exception) -> bool:
        """Read the SQLSTATE: a deadlock, a serialization failure, or a stale statement."""
        return getattr(error.__cause__, "sqlstate", None) in _UNDONE_FOR_OTHERS

    def read_anything(self, connection: BaseDatabaseWrapper) -> None:
        """Nothing to do: the server lets no bytes into a text that are none."""

    def tune(self, connection: BaseDatabaseWrapper) -> None:
        """Leave room for updates in place, and have the hot tables vacuumed early."""
        with connection.cursor() as cursor:
            cursor.execute(UNTUNED, [list(STORAGE)])
            for (table,) in cursor.fetchall():
                cursor.execute(f"ALTER TABLE {table} SET ({STORAGE[table]})")

    def limit_wait(self, connection: BaseDatabaseWrapper, seconds: float) -> None:
        """Set the session's lock timeout, where the session is nobody else's before or after.

        Through a pooler only the transactions that name a bound of their own have one.
        """
        connection.ensure_connection()
        shared = _is_pooled(connection) or connection.settings_dict["OPTIONS"].get("pool")
        if shared or conf.get().wakeup == "poll":
            return
        own_pid = connection.connection.info.backend_pid
        with connection.cursor() as cursor:
            cursor.execute(BOUND_WAITS_OF_SESSION, [_timeout(seconds), own_pid])


READ_ONLY: Final = "25006"
"""The SQLSTATE of a server, or a session, that only reads."""

# What a lost connection, a server that is shutting down and one that starts have in common: the
# transaction is gone, and a new connection is needed. Whether its COMMIT had been sent is known where
# it is sent, not here.
_TROUBLE_CLASSES: dict[str, Trouble] = {
    "08": "lost",
    "0A": "tables",  # not supported, among it a statement prepared for columns of other types
    "25": "tables",  # a transaction of another kind than it should be
    "26": "tables",  # a prepared statement that the server does not know
    "28": "tables",  # a role that may not log in
    "2B": "tables",
    "34": "tables",
    "3D": "tables",  # no such database
    "3F": "tables",  # no such schema
    "40": "busy",  # a deadlock, or a serialization failure
    "42": "tables",  # no such table or column, another type, or no right to it
    "44": "tables",  # a view's check
    "53": "full",  # no disk, no memory
    "55": "busy",  # a lock that was not free in time
    "57": "lost",  # stopped by an operator or by a restart
    "58": "unknown",  # an I/O error
    "XX": "unknown",  # damage
}
_TROUBLES: dict[str, Trouble] = {
    READ_ONLY: "lost",  # a standby: the server that takes writes is another now
    "53300": "lost",  # too many connections
    "55000": "tables",  # published without a replica identity, or a sequence at its end
    "57014": "busy",  # one statement was stopped, by a timeout or an operator
}

# There is no answer, or the server is starting or stopping.
_NOT_NOW: Final = frozenset({pq.Ping.NO_RESPONSE, pq.Ping.REJECT})

_UNDONE_FOR_OTHERS: Final = frozenset({"40001", "40P01", *STALE})

UNIQUE_VIOLATION: Final = "23505"


def _is_of_sequence(cause: Any) -> bool:
    """Say whether an id was given twice: only a sequence that is behind its table does that."""
    constraint = cause.diag.constraint_name or ""
    return bool(constraint == f"{cause.diag.table_name}_pkey")


# SQLSTATE classes after which the server cannot say whether a COMMIT happened.
_LOST: Final = frozenset({"08", "57", "58", "XX"})


@lru_cache(maxsize=64)
def _unnest(casts: tuple[str, ...]) -> str:
    return f"SELECT * FROM unnest({', '.join(f'%s::{cast}[]' for cast in casts)})"


def _cursor(connection: BaseDatabaseWrapper) -> PreparedCursor:
    return PreparedCursor(connection.connection, pooled=_is_pooled(connection))


def _is_pooled(connection: BaseDatabaseWrapper) -> bool:
    """Say whether the settings name a pooler that gives each transaction another session."""
    return bool(connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"))


def _only_id(row: tuple[Any, ...] | None) -> int | None:
    return None if row is None else int(row[0])


def _in_utc(moment: datetime) -> datetime:
    if moment.tzinfo is UTC:
        return moment
    if moment.utcoffset() is None:
        raise ValueError(f"{moment!r} has no time zone")
    return moment.astimezone(UTC)


def _timeout(seconds: float) -> str:
    # Not zero, which would mean for ever.
    return f"{max(1, round(seconds * 1000))}ms"


@contextmanager
def _own_transaction(
    connection: BaseDatabaseWrapper, wait_seconds: float | None, *, first: bool, defer_begin: bool
) -> Iterator[float]:
    block = _begin(connection, wait_seconds, first=first, defer_begin=defer_begin)
    try:
        yield 0.0
        if not connection.needs_rollback:
            _commit(connection)
    except BaseException as error:
        _cursor(connection).forget()
        block.__exit__(*sys.exc_info())
        if getattr(error.__cause__, "sqlstate", None) == READ_ONLY:
            # Demoted, most likely. Another server takes writes now, and only a new connection finds
            # it: Django would keep this one, which answers.
            connection.close()
        raise
    block.__exit__(None, None, None)


def _commit(connection: BaseDatabaseWrapper) -> None:
    """Commit, and send along what was posted; Django finds its transaction committed."""
    try:
        with connection.wrap_database_errors:
            _cursor(connection).execute("COMMIT")
    except DatabaseError as error:
        state = getattr(error.__cause__, "sqlstate", None)
        if state is None or state[:2] in _LOST:
            raise OutcomeUnknown(f"lost the server while committing: {error}") from error
        raise


def _begin(
    connection: BaseDatabaseWrapper, wait_seconds: float | None, *, first: bool, defer_begin: bool
) -> AbstractContextManager[Any]:
    """Open the transaction; once more if the connection turns out to be dead.

    The first statement finds out that a server was restarted, before anything was done. It does not
    do so here if it is to be sent with another.
    """
    fresh = connection.connection is None
    # A watcher of the statements, such as the query log, must see Django's BEGIN and COMMIT.
    fast = first and not is_watched(connection)
    block = FastAtomic(connection) if fast else transaction.atomic(connection.alias)
    block.__enter__()
    try:
        _open(connection, wait_seconds, first=first, defer_begin=defer_begin)
    except BaseException as error:
        block.__exit__(*sys.exc_info())
        if fresh or not isinstance(error, OperationalError | InterfaceError):
            raise
        connection.close()
        return _begin(connection, wait_seconds, first=first, defer_begin=defer_begin)
    return block


def _open(
    connection: BaseDatabaseWrapper, wait_seconds: float | None, *, first: bool, defer_begin: bool
) -> None:
    with connection.wrap_database_errors:
        cursor = _cursor(connection)
        cursor.forget()
        cursor.begin()
        if wait_seconds is None:
            cursor.post(READ_CLOCK, keep=True)
        else:
            statement = numbered(BEGIN_AS_WORKER if first else BOUND_WAITS)
            cursor.post(statement, [_timeout(wait_seconds)], keep=True)
        if not defer_begin:
            cursor.send()
