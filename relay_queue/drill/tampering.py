"""What is done to a SQLite database from outside of Relay: locks, torn tails, flipped bits.

The only module of the drill that knows SQLite's files. No process may have them open when bytes are
changed: closing a file of SQLite's drops the locks that its process has on it.
"""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from django.db import connection

DATABASE: Final = "relay.sqlite3"
LOG: Final = DATABASE + "-wal"


@contextmanager
def writer_taken(directory: Path) -> Iterator[None]:
    """Hold the write lock as a program does that knows nothing of Relay."""
    path = directory / DATABASE
    with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")


def write_out() -> None:
    """Bring everything from the log to the database file, and let both go."""
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def copy(directory: Path, name: str) -> Path:
    """Copy the database and its log, as they are, to a folder beside."""
    place = directory / name
    place.mkdir()
    for file in (DATABASE, LOG):
        if (directory / file).exists():
            shutil.copyfile(directory / file, place / file)
    return place


def tear_log(directory: Path, missing_bytes: int) -> None:
    """Cut the end of the log off, as a power cut does."""
    path = directory / LOG
    os.truncate(path, path.stat().st_size - missing_bytes)


def flip_bit(path: Path, place: int, mask: int = 1) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ mask]))


def places_of(path: Path, text: bytes) -> list[int]:
    """Return where a text stands in a file."""
    content, places, start = path.read_bytes(), [], 0
    while (found := content.find(text, start)) >= 0:
        places.append(found)
        start = found + 1
    return places


CAN_BREAK_WRITES: Final = sys.platform == "linux"


def break_writes(pid: int, most_bytes: int) -> None:
    """Let the system refuse a process's writes beyond so many bytes of a file.

    SQLite reports an I/O error then, of which nobody can say what is on disk.
    """
    assert sys.platform == "linux"
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, hard))
