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

from relay_queue.drill.faults import fill_disk
from relay_queue.drill.means import Means

DATABASE: Final = "relay.sqlite3"
LOG: Final = DATABASE + "-wal"


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


MOST_BYTES: Final = 2_000


class FileMeans(Means):
    """Another program's connection, bits of the file, and limits that the system sets."""

    fault_of_room = "room"

    def alter_argument(self, stored: str, other: str) -> None:
        """Flip a bit, wherever the text stands in the file."""
        write_out()
        place = next(
            n for n, both in enumerate(zip(stored, other, strict=True)) if len({*both}) > 1
        )
        path = self.directory / DATABASE
        for start in places_of(path, stored.encode()):
            flip_bit(path, start + place, ord(stored[place]) ^ ord(other[place]))

    @contextmanager
    def writer_taken(self) -> Iterator[None]:
        """Hold the write lock."""
        path = self.directory / DATABASE
        with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as other:
            other.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                other.execute("ROLLBACK")

    @contextmanager
    def no_room(self) -> Iterator[None]:
        """Let the fault strike that the workers were prepared with."""
        sign = self.directory / fill_disk.__name__
        sign.touch()
        yield
        sign.unlink()

    def break_writes(self, pid: int) -> bool:
        """Let the system refuse writes beyond so many bytes of a file.

        SQLite reports an I/O error then.
        """
        if sys.platform != "linux":
            return False
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
        return True
