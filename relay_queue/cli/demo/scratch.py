"""The scratch folder of the demo, and the environment that makes a process use it."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final

from django.conf import settings

import relay_queue

SETTINGS: Final = "relay_queue.cli.demo.settings"
VARIABLE: Final = "RELAY_DEMO_DIR"


def make_directory() -> Path:
    """Make an empty folder on a file system where locks and sockets work, and return it.

    Tries the usual temporary directory first. Raises ``OSError`` if none is usable.
    """
    problem: OSError | None = None
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]):
        try:
            directory = Path(tempfile.mkdtemp(prefix="relay-demo-", dir=parent))
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


def current_directory() -> Path | None:
    """Return the folder of the scratch project that this process runs in; None in any other."""
    directory = os.environ.get(VARIABLE)
    return Path(directory) if directory and settings.SETTINGS_MODULE == SETTINGS else None


def environment(directory: Path) -> dict[str, str]:
    """Return the variables under which a process sees the scratch project in ``directory``."""
    path = [str(Path(relay_queue.__file__).resolve().parent.parent)]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {
        VARIABLE: str(directory),
        "DJANGO_SETTINGS_MODULE": SETTINGS,
        "PYTHONPATH": os.pathsep.join(path),
    }


def command(directory: Path, verb: str) -> str:
    """Return the shell command that runs a verb of ``relay`` on the scratch project."""
    python = shlex.quote(sys.executable)
    variable = f"{VARIABLE}={shlex.quote(str(directory))}"
    return f"{variable} {python} -m django relay {verb} --settings {SETTINGS}"


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
