"""Connections to scratch files through the engine, and honest looks at the gate's file."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

ENGINE = "relay_queue.db.sqlite3"
DJANGOS_ENGINE = "django.db.backends.sqlite3"

HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
fcntl.flock(descriptor, fcntl.LOCK_EX)
if len(sys.argv) > 2:
    os.pwrite(descriptor, sys.argv[2].replace("PID", str(os.getpid())).encode().ljust(95) + b"\\n", 0)
print("held", flush=True)
sys.stdin.read()
"""


def is_locked(gate_path: str | Path) -> bool:
    """Say whether anybody holds the gate: a descriptor of its own cannot have the lock."""
    descriptor = os.open(gate_path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def held_elsewhere(gate_path: str | Path, note: str = "") -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the gate; it lets go when its input ends or it is killed.

    ``PID`` in its ``note`` becomes its process id.
    """
    command = [sys.executable, "-c", HOLD, str(gate_path), *([note] if note else [])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "scratch.db"


@pytest.fixture
def gate_path(database: Path) -> Path:
    return database.with_name("scratch.db-gate")


@pytest.fixture
def connect(database: Path, django_db_blocker: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that adds a database alias on the scratch file, and its connection."""
    aliases: list[str] = []

    def add(name: Any = None, engine: str = ENGINE, **options: Any) -> Any:
        alias = f"scratch{len(aliases)}"
        connections.settings[alias] = {
            **connections.settings["default"],
            "ENGINE": engine,
            "NAME": database if name is None else name,
            "OPTIONS": {"timeout": 20.0, **options},
            "TEST": {**connections.settings["default"]["TEST"], "NAME": None},
        }
        aliases.append(alias)
        return connections[alias]

    with ExitStack() as stack:
        stack.enter_context(django_db_blocker.unblock())
        yield add
        for alias in aliases:
            connections[alias].close()
            del connections[alias]
            del connections.settings[alias]


@pytest.fixture
def connection(connect: Callable[..., Any]) -> Any:
    """Return a connection of the engine to a file with one table ``t(n)``."""
    connection = connect()
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE t (n INTEGER)")
    return connection


@pytest.fixture
def rows(database: Path) -> Callable[[], list[int]]:
    """Return a function that reads ``t`` with the standard library alone."""
    import sqlite3

    def read() -> list[int]:
        with closing(sqlite3.connect(database)) as plain:
            return [n for (n,) in plain.execute("SELECT n FROM t ORDER BY rowid")]

    return read
