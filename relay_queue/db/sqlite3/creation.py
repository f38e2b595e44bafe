"""Test databases: clones of a database whose newest pages are still in its log."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from typing import Any

from django.db.backends.sqlite3 import creation

from relay_queue.db.gate import gate_for


class DatabaseCreation(creation.DatabaseCreation):
    """Django's test database creation, for databases with a write-ahead log."""

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
        """Delete a database that is not open, with its gate and the log of an interrupted test run."""
        os.remove(database)
        # An open gate of a file that is gone would let this process pass the others by.
        gate_for(database).close_files()
        for suffix in ("-wal", "-shm", "-gate", "-gate-next"):
            with suppress(FileNotFoundError):
                os.remove(f"{database}{suffix}")
