"""What the drill does to a database from outside of Relay: locks, damage, errors, connections cut.

Rows ask an injector, which has two ways: `FileInjector` for a file of SQLite, and `ServerInjector` for
PostgreSQL. No process may have the file open when its bytes are changed: closing a file of SQLite's
drops the locks that its process has on it. A server keeps its files to itself, but it can be made to
say what it says when they fail.
"""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Final

from django.db import connection

from relay_queue.lab.faults import fill_disk
from relay_queue.lab.project import ScratchProject
from relay_queue.lab.settings import DATABASE
from relay_queue.models import Job, Lease
from relay_queue.store.dialects import dialect_for


class FaultInjector(ABC):
    """The ways to harm the database of one scratch project."""

    fault_of_room: str
    """What workers must be prepared with for `no_room`, see `faults`; empty if with nothing."""

    def __init__(self, project: ScratchProject) -> None:
        self.project = project

    has_connections = False
    """Whether workers reach the database by connections that can be cut."""

    @abstractmethod
    def alter_argument(self, stored: str, other: str) -> None:
        """Replace the text ``stored`` in the payload of a job that does not run.

        ``other`` has the same length, and differs in one bit of one character.
        """

    @abstractmethod
    def writer_taken(self) -> AbstractContextManager[None]:
        """Keep all workers from writing outcomes, as a program does that knows nothing of Relay."""

    @abstractmethod
    def no_room(self) -> AbstractContextManager[None]:
        """Make the database report a full disk to the workers."""

    @abstractmethod
    def break_writes(self, pid: int) -> bool:
        """Make writes of a process fail from now on, so that it cannot know what is on the disk.

        Returns whether that can be done on this system.
        """

    def cut_connections(self) -> int:
        """End the workers' connections, and return how many there were."""
        return 0


def injector_for(project: ScratchProject) -> FaultInjector:
    """Return the injector for the engine of a project."""
    return (ServerInjector if dialect_for(connection).has_sessions else FileInjector)(project)


# -- a file


LOG: Final = DATABASE + "-wal"

MOST_BYTES: Final = 2_000
"""Of a file, once the system limits it."""


class FileInjector(FaultInjector):
    """Another program's connection, bits of the file, and limits that the system sets."""

    fault_of_room = "room"

    def alter_argument(self, stored: str, other: str) -> None:
        """Flip a bit, wherever the text stands in the file."""
        write_out()
        place = next(
            n for n, both in enumerate(zip(stored, other, strict=True)) if len({*both}) > 1
        )
        path = self.project.file
        for start in places_of(path, stored.encode()):
            flip_bit(path, start + place, ord(stored[place]) ^ ord(other[place]))

    @contextmanager
    def writer_taken(self) -> Iterator[None]:
        """Hold the write lock."""
        path = self.project.file
        with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as other:
            other.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                other.execute("ROLLBACK")

    @contextmanager
    def no_room(self) -> Iterator[None]:
        """Make the fault strike that the workers were prepared with."""
        self.project.make(fill_disk.__name__)
        yield
        (self.project.directory / fill_disk.__name__).unlink()

    def break_writes(self, pid: int) -> bool:
        """Make the system refuse writes beyond so many bytes of a file.

        SQLite reports an I/O error then.
        """
        if sys.platform != "linux":
            return False
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
        return True


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


# -- a server


ALTER: Final = f"UPDATE {Job._meta.db_table} SET payload = replace(payload, %s, %s)"

LOCK: Final = f"LOCK TABLE {Lease._meta.db_table} IN EXCLUSIVE MODE"
"""Let others read, and make every writer, and every session that would lock a row, wait."""

FAIL: Final = """
    CREATE FUNCTION drill_fault() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF (SELECT {condition} FROM pg_stat_activity WHERE pid = pg_backend_pid()) THEN
            RAISE EXCEPTION 'the drill lets this fail' USING ERRCODE = '{condition_name}';
        END IF;
        RETURN NULL;
    END $$
"""
"""Make the server report an error to some of its sessions, with the error's own code."""

ARM: Final = f"""
    CREATE TRIGGER drill_fault BEFORE INSERT OR UPDATE ON {Lease._meta.db_table}
    FOR EACH STATEMENT EXECUTE FUNCTION drill_fault()
"""
"""Call it when outcomes are settled or leases are granted."""

DISARM: Final = "DROP FUNCTION drill_fault() CASCADE"

NOW: Final = "SELECT clock_timestamp()::text"

CUT: Final = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
"""End all connections but our own, as an administrator does, or a firewall."""


class ServerInjector(FaultInjector):
    """Plain SQL, as any client may send it."""

    fault_of_room = ""
    has_connections = True

    def alter_argument(self, stored: str, other: str) -> None:
        """Update it."""
        _run(ALTER, stored, other)

    @contextmanager
    def writer_taken(self) -> Iterator[None]:
        """Hold a lock on the table of leases."""
        locking = connection.copy()
        try:
            with locking.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute(LOCK)
                yield
        finally:
            locking.close()

    @contextmanager
    def no_room(self) -> Iterator[None]:
        """Make the server report a full disk to every session."""
        self._arm("true", "disk_full")
        yield
        _run(DISARM)

    def break_writes(self, pid: int) -> bool:
        """Make the server report an I/O error to the sessions that are open now.

        A process that replaces one of these has new sessions.
        """
        ((now,),) = _run(NOW)
        self._arm(f"backend_start < '{now}'", "io_error")
        return True

    def cut_connections(self) -> int:
        """Make the server end them."""
        return len(_run(CUT))

    @staticmethod
    def _arm(condition: str, condition_name: str) -> None:
        _run(FAIL.format(condition=condition, condition_name=condition_name))
        _run(ARM)


def _run(statement: str, *params: Any) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, params or None)
        rows: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
        return rows
