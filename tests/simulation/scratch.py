"""The scratch database of a simulation, and connections that let the simulation strike at commits."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol
from unittest import mock

from django.apps import apps
from django.db import connections
from django.db.migrations.executor import MigrationExecutor
from django.test import override_settings

from tests.history import ledger, witness

ALIAS = "simulation"

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one: the simulation commits a hundred times a seed."""


class Strikes(Protocol):
    """What a simulation does at the points where a process or a disk may fail."""

    def moment(self) -> str: ...

    def between_statements(self) -> None: ...

    def before_commit(self) -> None: ...

    def after_commit(self) -> None: ...


class Connection(sqlite3.Connection):
    """A connection that tells the simulation of its statements and commits."""

    strikes: ClassVar[Strikes | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.create_function("history_now", 0, self._moment)

    def _moment(self) -> str | None:
        return None if self.strikes is None else self.strikes.moment()

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:
        """Return a cursor that pauses after each statement."""
        return super().cursor(_pausing(factory))

    def commit(self) -> None:
        """Commit, unless the simulation has other plans."""
        if self.strikes is None or not self.in_transaction:
            super().commit()
            return
        try:
            self.strikes.before_commit()
        except Exception:
            raise
        except BaseException:
            # A process that ends takes its transaction with it. Left open, Django's way out of the
            # block would commit it.
            super().rollback()
            raise
        super().commit()
        self.strikes.after_commit()


@lru_cache(maxsize=8)
def _pausing(factory: Any) -> Any:
    """Return a kind of cursor that lets others act after each statement of a transaction."""

    def execute(self: Any, *args: Any) -> Any:
        result = factory.execute(self, *args)
        if Connection.strikes is not None and self.connection.in_transaction:
            Connection.strikes.between_statements()
        return result

    return type(f"Pausing{factory.__name__}", (factory,), {"execute": execute})


class Scratch:
    """One database file, used for one seed after the other."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "simulation.sqlite3"
        self._owned: dict[str, Any] = {}
        self.reader: sqlite3.Connection

    def connection(self, owner: str) -> Any:
        """Return the connection of an actor, the same in every seed."""
        if owner not in self._owned:
            self._owned[owner] = connections.create_connection(ALIAS)
        return self._owned[owner]

    def begin(self) -> None:
        """Make the tables, and take notes of all that is committed to them."""
        connections[ALIAS] = self.connection("maker")
        executor = MigrationExecutor(connections[ALIAS])
        executor.migrate([k for k in executor.loader.graph.leaf_nodes() if k[0] == "relay_queue"])
        witness.install(self.connection("maker").connection, now="history_now()")
        # An independent reader: it sees what is committed and nothing else.
        self.reader = sqlite3.connect(self.path, isolation_level=None)

    def wipe(self) -> None:
        """Empty all tables and let the ids begin at one again."""
        raw = self.connection("maker").connection
        raw.execute("BEGIN IMMEDIATE")
        for model in apps.get_app_config("relay_queue").get_models():
            raw.execute(f"DELETE FROM {model._meta.db_table}")
        raw.execute(f"DELETE FROM {witness.TABLE}")
        raw.execute("DELETE FROM sqlite_sequence")
        raw.execute("COMMIT")

    def read(self) -> ledger.Ledger:
        """Read what is committed."""
        return ledger.read(self.reader)

    def close(self) -> None:
        """Close all connections."""
        self.reader.close()
        for owned in self._owned.values():
            owned.close()


def _options() -> dict[str, Any]:
    return {"factory": Connection, "timeout": 0, "init_command": "PRAGMA synchronous=OFF"}


def _no_gate(_: object) -> None:
    """Answer for the gate of a connection. A mock would take one part in twenty of a run."""


@contextmanager
def scratch() -> Iterator[Scratch]:
    """Make a scratch database, and point Relay at it for the length of the block."""
    with ExitStack() as undo:
        place = str(MEMORY) if MEMORY.is_dir() else None
        directory = Path(tempfile.mkdtemp(prefix="relay-simulation-", dir=place))
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        made = Scratch(directory)
        options = {**connections.settings["default"], "NAME": str(made.path), "OPTIONS": _options()}
        undo.enter_context(mock.patch.dict(connections.settings, {ALIAS: options}))
        undo.enter_context(override_settings(RELAY={"DATABASE": ALIAS}))
        undo.enter_context(mock.patch("relay_queue.db.sqlite3.base.gate_of", _no_gate))
        undo.callback(connections.__delitem__, ALIAS)
        made.begin()
        undo.enter_context(closing(made))
        yield made
