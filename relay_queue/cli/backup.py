"""``relay backup``: copy the database while it is in use."""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from django.core.management.base import CommandError
from django.db import connections

from relay_queue import conf
from relay_queue.cli.base import Output, add_json
from relay_queue.wakeup.files import database_path

HELP = (
    "Copy the SQLite database to a new file while it is in use, check the copy, and only then give "
    "it its name. Never overwrites."
)

LOCKED_SECONDS = 60.0
"""Seconds that a copy waits for a locked database."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    parser.add_argument("destination", metavar="DEST", type=Path, help="The file to make.")


def run(options: argparse.Namespace, out: Output) -> int:
    """Back up to a hidden file beside the destination, check it, and rename it."""
    destination: Path = options.destination.absolute()
    alias = conf.get().database
    if database_path(alias) is None:
        raise CommandError(
            f"the database {alias!r} has no file of its own to copy. For a database server use its "
            "own tool, pg_dump for PostgreSQL."
        )
    if destination.exists():
        raise CommandError(f"{destination} exists. Name a file that does not; none is overwritten.")
    if not destination.parent.is_dir():
        raise CommandError(f"{destination.parent} is no directory. Make it, or name another.")
    try:
        jobs = _back_up(alias, destination)
    except (OSError, sqlite3.Error) as error:
        raise CommandError(f"the backup failed and left nothing behind: {error}") from error
    size = destination.stat().st_size
    out.data({"path": str(destination), "size_bytes": size, "jobs": jobs})
    out.line(f"{destination}: {size:,} bytes, {jobs:,} jobs, integrity checked", "good")
    return 0


def _back_up(alias: str, destination: Path) -> int:
    """Copy, check and name the file; return how many jobs it holds.

    Only its maker may read the copy, as ``mkstemp`` makes it: it holds everything that the database
    does, and its directory may be open to others.
    """
    handle, name = tempfile.mkstemp(prefix=f".{destination.name}.", dir=destination.parent)
    os.close(handle)
    partial = Path(name)
    try:
        jobs = _copy(alias, partial)
        _name(partial, destination)
    finally:
        for leftover in (partial, *(Path(f"{name}{suffix}") for suffix in ("-wal", "-shm"))):
            leftover.unlink(missing_ok=True)
    return jobs


def _copy(alias: str, target: Path) -> int:
    """Copy in one step, which is one snapshot, while writers go on."""
    connection = connections[alias]
    connection.ensure_connection()
    with closing(sqlite3.connect(target)) as copy:
        connection.connection.backup(copy, progress=_patience())
        # Then the copy is one file, complete without a log beside it.
        copy.execute("PRAGMA journal_mode = DELETE")
        ((verdict,),) = copy.execute("PRAGMA integrity_check(1)").fetchall()
        if verdict != "ok":
            raise sqlite3.DatabaseError(
                f"the copy is damaged: {verdict}. So is the original: run relay verify."
            )
        return int(copy.execute("SELECT count(*) FROM relay_queue_job").fetchone()[0])


def _patience() -> Callable[[int, int, int], None]:
    """Return the callback of each try; without it a copy would wait for a lock for ever."""
    deadline = time.monotonic() + LOCKED_SECONDS

    def check(status: int, _remaining: int, _total: int) -> None:
        if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) and time.monotonic() > deadline:
            raise TimeoutError(f"the database was locked for {LOCKED_SECONDS:g} s; try again")

    return check


def _name(partial: Path, destination: Path) -> None:
    """Give the finished file its name. Raises ``FileExistsError`` if another file has it."""
    try:
        os.link(partial, destination)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links. A rename would overwrite, so check once more.
        if destination.exists():
            raise FileExistsError(f"{destination} exists") from None
        partial.rename(destination)
    _sync(destination.parent)


def _sync(directory: Path) -> None:
    """Make the name survive a power failure, where directories can be synced."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
