"""Notices that the file at a database's path is no longer the one that a connection has open.

A restored backup, a rename or ``rm`` puts another file there. A process that goes on writes to a
file that has no name any more. The log at the path belongs to that old file: the next process to
open the new file applies the log to it and damages it. So writers look before each write, and the
first connection to the new file puts the old log aside.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from relay_queue.db.beside import Folder
from relay_queue.db.filename import file_of
from relay_queue.db.gatefile import LogOwner, identity_of_log

logger = logging.getLogger("relay_queue.db")

LOG_SUFFIX = "-wal"
INDEX_SUFFIX = "-shm"
ASIDE = "-wal-replaced-"
"""What the name of a log goes on with that was put aside; then comes the time."""


@dataclass
class OpenFile:
    """The file that a connection has opened.

    ``raw`` is the id of the driver's own connection: a reference would keep one open that Django
    has thrown away.
    """

    raw: int
    path: str
    device: int
    inode: int
    noted: bool = False
    """Whether the gate's files say that the log at the path belongs to this file."""


def remember(connection: Any) -> None:
    """Note which file a Django connection has just opened. One in memory has none."""
    connection._relay_file = None
    path = file_of(str(connection.settings_dict["NAME"] or ""))
    if path is None:
        return
    path = os.path.abspath(path)  # a relative one means something else after chdir()
    with suppress(OSError):
        found = os.stat(path)
        connection._relay_file = OpenFile(
            id(connection.connection), path, found.st_dev, found.st_ino
        )


def check(connection: Any) -> None:
    """Raise ``sqlite3.OperationalError`` if another file is at the path, or none.

    For callers that are about to write, or look for work. One ``stat``: about a microsecond.
    """
    seen: OpenFile | None = getattr(connection, "_relay_file", None)
    if seen is None or seen.raw != id(connection.connection):
        return
    try:
        found = os.stat(seen.path)
    except FileNotFoundError:
        raise _replaced(seen, "was removed") from None
    except OSError:
        return  # the folder may not be searched any more: that proves nothing
    if found.st_ino != seen.inode or found.st_dev != seen.device:
        raise _replaced(seen, "was replaced by another file")


def note_log(connection: Any, note: Callable[[int], bool]) -> None:
    """Note whose log lies at the path, once for each connection: after its first write.

    Only then is there a log. ``note`` is `Gate.note_log`; the caller still holds that gate.
    """
    seen: OpenFile | None = getattr(connection, "_relay_file", None)
    if seen is not None and not seen.noted:
        seen.noted = note(seen.inode)


def _replaced(seen: OpenFile, what: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(
        f"the database {seen.path} {what} after this process had opened it. Nothing more is written "
        "to the file that was there. Open a new connection to use the one at the path, or start the process "
        "again; and stop all processes before you restore a backup"
    )
    error.sqlite_errorcode = sqlite3.SQLITE_READONLY_DBMOVED
    error.sqlite_errorname = "SQLITE_READONLY_DBMOVED"
    return error


def has_foreign_log(database: str, owner: LogOwner | None) -> bool:
    """Whether the log beside ``database`` is still that of ``owner``, another file that was there.

    That is sure only if it is the very log that was noted, in this boot. After a boot inodes may
    have other numbers, and a copy of all files together has a log of its own.
    """
    if owner is None:
        return False
    try:
        file, log = os.stat(database), os.stat(f"{database}{LOG_SUFFIX}")
    except OSError:
        return False
    if file.st_ino == owner.file or not log.st_size:
        return False
    return identity_of_log(database) == owner.log


def put_log_aside(database: str) -> None:
    """Give the log another name, where SQLite does not find it, and say so. Raises ``OSError``.

    The caller holds the gate. A process that still has the old files open goes on with them as they
    are.
    """
    name = os.path.basename(database)
    aside = f"{name}{ASIDE}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
    with Folder.of(database) as folder:
        # Two in one second: a rename would delete the one that was put aside before.
        names = chain([aside], (f"{aside}-{number}" for number in count(2)))
        aside = next(free for free in names if not _is_there(free, folder))
        here = {"src_dir_fd": folder.number, "dst_dir_fd": folder.number}
        os.rename(f"{name}{LOG_SUFFIX}", aside, **here)
        folder.remove(f"{name}{INDEX_SUFFIX}")
    logger.error(
        "The database %s was replaced while it was in use. The log of the file that was there "
        "would damage this one, so it is called %s now. What was committed to it and not yet "
        "copied into that file is only there; delete it if you do not need it.",
        database,
        aside,
    )


def _is_there(name: str, folder: Folder) -> bool:
    try:
        os.stat(name, dir_fd=folder.number, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def logs_put_aside(database: str) -> list[str]:
    """Return the names of the logs of replaced files beside ``database``. Raises ``OSError``."""
    folder, name = os.path.split(os.path.realpath(database))
    return sorted(entry for entry in os.listdir(folder) if entry.startswith(name + ASIDE))
