"""Test databases: in memory by default as Django's, and in files with a log and a gate."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from typing import Any

from django.db.backends.sqlite3 import creation

from relay_queue.db.gate import gate_for


class DatabaseCreation(creation.DatabaseCreation):
    """Django's test database creation, for databases with a write-ahead log."""

    def _get_test_db_name(self) -> str:
        if self._was_made_up():
            return f"file:memorydb_{self.connection.alias}?mode=memory&cache=shared"
        name: str = super()._get_test_db_name()  # type: ignore[misc]
        return name

    def _was_made_up(self) -> bool:
        """Say whether a test runner made the name up for a server's database, with a suffix.

        pytest-django gives each process of xdist, and each environment of tox, a database named
        ``test_<NAME>_<suffix>``. It leaves Django's own SQLite engine out, which it knows by its
        path. Of a path that makes a file in a folder ``test_``, which is not there. Each of these
        processes has a memory of its own, so they need no names.
        """
        given = str(self.connection.settings_dict["TEST"]["NAME"] or "")
        name = str(self.connection.settings_dict["NAME"])
        folder = os.path.dirname(given)
        if not folder or os.path.isdir(folder) or not given.startswith("test_"):
            return False
        asked = given.removeprefix("test_")
        return asked.startswith(f"{name}_") or os.path.abspath(asked).startswith(f"{name}_")

    def _clone_test_db(self, suffix: str, verbosity: int, keepdb: bool = False) -> None:
        source = self.connection.settings_dict["NAME"]
        if self.is_in_memory_db(source):
            super()._clone_test_db(suffix, verbosity, keepdb)  # type: ignore[misc]
            return
        target = self.get_test_db_clone_settings(suffix)["NAME"]
        if os.path.exists(target):
            if keepdb:
                return
            self._remove(target)
        # Django copies the file, which misses what is only in the log, and drops SQLite's
        # locks on it in this process when it closes the copy's source.
        self.connection.ensure_connection()
        with closing(sqlite3.connect(target)) as clone:
            self.connection.connection.backup(clone)

    def _destroy_test_db(self, test_database_name: Any, verbosity: int) -> None:
        if test_database_name and not self.is_in_memory_db(test_database_name):
            self._remove(test_database_name)

    @staticmethod
    def _remove(database: str) -> None:
        """Delete a database that is not open, with its gate, the log of an interrupted run, and the
        folders of its workers.
        """
        os.remove(database)
        # An open gate of a file that is gone would let this process pass the others by.
        gate_for(database).close_files()
        for suffix in ("-wal", "-shm", "-gate", "-gate-next"):
            with suppress(FileNotFoundError):
                os.remove(f"{database}{suffix}")
        # What workers of the tests have left. Through a link nothing is deleted.
        for suffix in ("-workers", "-bells"):
            shutil.rmtree(f"{database}{suffix}", ignore_errors=True)
