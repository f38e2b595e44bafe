"""Where the file of an SQLite database is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import connections

from relay_queue.db import filename

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def database_path(using: str) -> str | None:
    """Return the path of the SQLite file behind alias `using`, or None if it has no file."""
    return file_of(connections[using])


def file_of(connection: BaseDatabaseWrapper) -> str | None:
    """Return the path of the SQLite file behind a connection, or None if it has no file."""
    # Only Django's SQLite connections answer this question, so only they can have a file.
    if not hasattr(connection, "is_in_memory_db"):
        return None
    return filename.file_of(str(connection.settings_dict["NAME"] or ""))
