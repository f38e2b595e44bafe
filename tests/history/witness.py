"""Let the database itself note each change of a job's state and of a lease, as it commits.

Triggers write into a table that Relay does not know. A change that is rolled back takes its note
with it, so the notes are exactly what was committed, in the order of the commits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

TABLE = "history_change"

WALL = "(strftime('%Y-%m-%dT%H:%M:%f', 'now') || '+00:00')"
"""The time of a note where no test moves the clock."""


class Note(NamedTuple):
    """What a trigger writes, and when."""

    event: str
    kind: str
    job: str
    lease: str
    old: str
    new: str
    detail: str
    condition: str = "1"


NOTES = {
    "job_added": Note(
        "INSERT ON relay_queue_job", "job", "NEW.id", "NULL", "NULL", "NEW.state", "NEW.payload"
    ),
    "job_moved": Note(
        "UPDATE OF state ON relay_queue_job",
        "job",
        "NEW.id",
        "NULL",
        "OLD.state",
        "NEW.state",
        "NEW.attempt",
        "OLD.state <> NEW.state",
    ),
    "job_deleted": Note(
        "DELETE ON relay_queue_job", "job", "OLD.id", "NULL", "OLD.state", "'deleted'", "NULL"
    ),
    "lease_granted": Note(
        "INSERT ON relay_queue_lease",
        "lease",
        "NEW.job_id",
        "NEW.id",
        "NULL",
        "'open'",
        "(SELECT available_at FROM relay_queue_job WHERE id = NEW.job_id)",
    ),
    "lease_ended": Note(
        "UPDATE OF ended_at, outcome ON relay_queue_lease",
        "lease",
        "NEW.job_id",
        "NEW.id",
        "COALESCE(OLD.outcome, 'open')",
        "COALESCE(NEW.outcome, 'open')",
        "NEW.ended_at",
        "OLD.outcome IS NOT NEW.outcome OR OLD.ended_at IS NOT NEW.ended_at",
    ),
    "lease_renewed": Note(
        "UPDATE OF expires_at ON relay_queue_lease",
        "renewal",
        "NEW.job_id",
        "NEW.id",
        "OLD.expires_at",
        "NEW.expires_at",
        "NULL",
        "OLD.expires_at <> NEW.expires_at",
    ),
}


def install(connection: Any, now: str = WALL) -> None:
    """Begin to take notes; ``now`` is the SQL expression of their time."""
    columns = (
        "seq INTEGER PRIMARY KEY, at TEXT, kind TEXT, job INTEGER, lease INTEGER, old, new, detail"
    )
    connection.execute(f"CREATE TABLE {TABLE} ({columns})")
    for name, note in NOTES.items():
        values = f"{note.job}, {note.lease}, {note.old}, {note.new}, {note.detail}"
        connection.execute(
            f"CREATE TRIGGER history_{name} AFTER {note.event} WHEN {note.condition} BEGIN "
            f"INSERT INTO {TABLE} (at, kind, job, lease, old, new, detail) "
            f"VALUES ({now}, '{note.kind}', {values}); END"
        )


def remove(connection: Any) -> None:
    """Take no more notes, and throw away those that were taken."""
    for name in NOTES:
        connection.execute(f"DROP TRIGGER IF EXISTS history_{name}")
    connection.execute(f"DROP TABLE IF EXISTS {TABLE}")


@contextmanager
def watching(database: str) -> Iterator[None]:
    """Take notes in a database that other processes use, for the length of the block."""
    for verb in (remove, install):
        with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
            verb(connection)
    try:
        yield
    finally:
        with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
            remove(connection)
