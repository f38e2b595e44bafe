"""The witness inside PostgreSQL; see `tests.history.witness`.

Transactions commit side by side there, so the notes of two jobs have no order. Those of one job have:
whoever changes it has locked its row, or the row of its lease, before the note is numbered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from tests.history.witness import NOTES, TABLE

COLUMNS = (
    "seq bigserial PRIMARY KEY, at text, kind text, job bigint, lease bigint, old text, new text, "
    "detail text"
)
NOW = """to_char(transaction_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') || '+00:00'"""
"""One time for each transaction, as SQLite's notes have by its lock."""


def install(connection: psycopg.Connection[Any]) -> None:
    """Begin to take notes."""
    connection.execute(f"CREATE TABLE {TABLE} ({COLUMNS})".encode())
    for name, note in NOTES.items():
        texts = ", ".join(f"({value})::text" for value in (note.old, note.new, note.detail))
        condition = note.condition.replace(" IS NOT NEW", " IS DISTINCT FROM NEW")
        condition = condition if condition != "1" else "TRUE"
        connection.execute(
            f"CREATE FUNCTION history_{name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"INSERT INTO {TABLE} (at, kind, job, lease, old, new, detail) "
            f"VALUES ({NOW}, '{note.kind}', {note.job}, {note.lease}, {texts}); "
            f"RETURN NULL; END $$".encode()
        )
        connection.execute(
            f"CREATE TRIGGER history_{name} AFTER {note.event} FOR EACH ROW WHEN ({condition}) "
            f"EXECUTE FUNCTION history_{name}()".encode()
        )


def remove(connection: psycopg.Connection[Any]) -> None:
    """Take no more notes, and throw away those that were taken."""
    for name in NOTES:
        connection.execute(f"DROP FUNCTION IF EXISTS history_{name} CASCADE".encode())
    connection.execute(f"DROP TABLE IF EXISTS {TABLE}".encode())


@contextmanager
def watching(address: str) -> Iterator[None]:
    """Take notes in a database that other processes use, for the length of the block."""
    with psycopg.connect(address, autocommit=True) as connection:
        remove(connection)
        install(connection)
    yield
    with psycopg.connect(address, autocommit=True) as connection:
        remove(connection)
