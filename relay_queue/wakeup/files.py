"""Files beside an SQLite database: where they are, and who may use them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from django.db import connections

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def database_path(using: str) -> str | None:
    """Return the path of the SQLite file behind alias `using`, or None if it has no file."""
    return file_of(connections[using])


def file_of(connection: BaseDatabaseWrapper) -> str | None:
    """Return the path of the SQLite file behind a connection, or None if it has no file."""
    # Only Django's SQLite connections answer this question, so only they can have a file.
    is_in_memory = getattr(connection, "is_in_memory_db", None)
    if is_in_memory is None or is_in_memory():
        return None
    name = str(connection.settings_dict["NAME"])
    return unquote(urlsplit(name).path) if name.startswith("file:") else name


def directory_beside(database_path: str, suffix: str) -> str:
    """Return the directory `<database><suffix>`, made if missing.

    A directory made here may be used by whoever can write the database. Raises `OSError`.
    """
    directory = os.path.realpath(database_path) + suffix
    with suppress(FileExistsError):
        os.mkdir(directory)
        share_like_database(database_path, directory)
    return directory


def share_like_database(database_path: str, path: str) -> None:
    """Give `path`, owned by this process, to those who can write the database.

    It takes the database's group, and for root its owner. Without the right to set the group,
    the group gets no access: it would be another group. No database yet: nothing changes.
    """
    try:
        database = os.stat(database_path)
    except FileNotFoundError:
        return
    access = 0o7 if os.path.isdir(path) else 0o6
    classes = [shift for shift in (6, 3, 0) if database.st_mode >> shift & stat.S_IWOTH]
    try:
        os.chown(path, database.st_uid if os.geteuid() == 0 else -1, database.st_gid)
    except PermissionError:
        classes = [shift for shift in classes if shift != 3]
    os.chmod(path, sum(access << shift for shift in {6, *classes}))
