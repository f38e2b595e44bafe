"""The temporary folder of a scratch project."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

import relay_queue


def make(prefix: str) -> Path:
    """Make an empty folder on a file system where locks and sockets work, and return it.

    Tries the usual temporary directory first. Raises ``OSError`` if none is usable.
    """
    problem: OSError | None = None
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]):
        try:
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError as error:
            problem = problem or error
            continue
        try:
            _try_out(directory)
        except OSError as error:
            problem = problem or error
            shutil.rmtree(directory, ignore_errors=True)
            continue
        return directory
    raise OSError(f"No temporary directory has locks and sockets: {problem}. Set TMPDIR.")


def python_path() -> str:
    """Return the ``PYTHONPATH`` under which a process finds this package from any directory."""
    path = [str(Path(relay_queue.__file__).resolve().parent.parent)]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join(path)


def _try_out(directory: Path) -> None:
    """Do what workers do beside a database. Raises ``OSError`` where that is impossible."""
    lock, bell = directory / "lock", directory / "bell"
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        # Socket paths are short; the doorbell has its own ways with long ones.
        if len(os.fsencode(bell)) <= 100:
            made.bind(str(bell))
            bell.unlink()
    lock.unlink()
