"""What a database server tells of itself: its settings, its load, and the size of its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.apps import apps
from django.db.models import AutoField

from relay_queue import clock
from relay_queue.query import reads

SETTINGS: Final = (
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "autovacuum",
    "default_transaction_isolation",
)
"""The settings that decide whether jobs are safe and claims stay fast."""

READ: Final = f"""
    SELECT current_setting('server_version'), clock_timestamp(), pg_is_in_recovery(),
           {", ".join(f"current_setting('{name}')" for name in SETTINGS)},
           (SELECT min(xact_start) FROM pg_stat_activity WHERE datname = current_database()
            AND pid <> pg_backend_pid()),
           (SELECT count(*) FROM pg_stat_activity),
           current_setting('max_connections')::int,
           pg_database_size(current_database())
"""
"""Read everything in one statement."""

TABLES: Final = """
    SELECT relname, pg_total_relation_size(relid), n_live_tup, n_dead_tup
    FROM pg_stat_user_tables WHERE relname LIKE %s ORDER BY relname
"""
"""Read how large the queue's tables are, and how many of their rows are dead."""

BEHIND: Final = """
    SELECT COALESCE(pg_sequence_last_value(pg_get_serial_sequence(%s, %s)::regclass), 0), max({pk})
    FROM {table}
"""
"""Read the last id that a table's sequence has given, and the highest that the table has."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server as it is now. ``clock_ahead_seconds`` is by how much its clock differs from ours."""

    version: str
    now: datetime
    clock_ahead_seconds: float
    standby: bool
    settings: dict[str, str]
    oldest_transaction_at: datetime | None
    connections: int
    max_connections: int
    size_bytes: int


def read_server() -> Server | None:
    """Return the server that holds the queue; None if it is a file."""
    if not reads.dialect().has_sessions:
        return None
    reads.connection().ensure_connection()  # connecting is not part of what is timed
    before = clock.now()
    ((version, now, standby, *values),) = reads.rows(READ)
    middle = before + (clock.now() - before) / 2
    return Server(
        f"PostgreSQL {version}",
        now,
        (now - middle).total_seconds(),
        standby,
        dict(zip(SETTINGS, values[: len(SETTINGS)], strict=True)),
        *values[len(SETTINGS) :],
    )


def table_sizes() -> dict[str, dict[str, Any]]:
    """Return the size of each table with its indexes, its rows, and how many of them are dead."""
    return {
        name: {"size_bytes": size, "rows": rows, "dead_rows": dead}
        for name, size, rows, dead in reads.rows(TABLES, "relay\\_queue\\_%")
    }


def sequences_behind() -> Iterator[tuple[str, int, int]]:
    """Yield each table whose sequence is behind it: its name, the last id given, the highest id."""
    quoted = reads.connection().ops.quote_name
    for model in apps.get_app_config("relay_queue").get_models():
        pk, table = model._meta.pk, model._meta.db_table
        if model._meta.proxy or not isinstance(pk, AutoField) or pk.column is None:
            continue
        statement = BEHIND.format(pk=quoted(pk.column), table=quoted(table))
        ((given, highest),) = reads.rows(statement, quoted(table), pk.column)
        if highest is not None and given < highest:
            yield table, int(given), int(highest)
