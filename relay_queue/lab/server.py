"""Scratch databases on the server that holds the queue: made and dropped by the process that uses them.

The statements go over a connection to the project's own database, which is known to be there. Nothing
in that database is read or written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.utils import ConnectionHandler

from relay_queue.lab.processes import undisturbed
from relay_queue.store.dialects import dialect_for

GIVEN: Final = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")
"""The keys of an entry of ``DATABASES`` that say where a server is, and as which role to connect."""

CONNECT_SECONDS: Final = 10

RIGHT: Final = """
    SELECT current_user, rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user
"""
"""Read which role this is, and whether it may make databases."""

ROOM: Final = """
    SELECT current_setting('max_connections')::int - count(*) FROM pg_stat_activity
"""
"""Count the connections that are free."""

MISSING_SCHEMA: Final = """
    SELECT trim(split_part(current_setting('search_path'), ',', 1), ' "')
    WHERE current_schema() IS NULL
"""
"""Name the schema for the tables where the settings choose one that a new database does not have."""

CUT_OFF: Final = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = %s AND pg_has_role(usename, 'USAGE')
"""
"""End the connections to a database, as far as this role may: autovacuum makes room by itself."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server, as an entry of ``DATABASES`` names it with one of its databases."""

    entry: Mapping[str, Any]

    @classmethod
    def of(cls, alias: str) -> Server | None:
        """Return the server behind an alias; None if that is a file."""
        connection = connections[alias]
        if not dialect_for(connection).has_sessions:
            return None
        entry = {key: connection.settings_dict[key] for key in GIVEN}
        # A pool would keep sessions of a database that is to be dropped.
        options = {k: v for k, v in (entry["OPTIONS"] or {}).items() if k != "pool"}
        return cls({**entry, "OPTIONS": options})

    @classmethod
    def of_json(cls, text: str) -> Server:
        """Return what `as_json` has written."""
        return cls(json.loads(text))

    def as_json(self) -> str:
        """Return it for the environment of a process. It holds the password, if there is one."""
        return json.dumps(dict(self.entry), default=str)

    def right_to_create(self) -> tuple[str, bool]:
        """Return the name of the role, and whether it may make databases."""
        with self._cursor() as cursor:
            cursor.execute(RIGHT)
            role, may = cursor.fetchone()
            return str(role), bool(may)

    def free_connections(self) -> int:
        """Return how many more connections the server would take."""
        with self._cursor() as cursor:
            cursor.execute(ROOM)
            return int(cursor.fetchone()[0])

    @contextmanager
    def database(self, name: str) -> Iterator[None]:
        """Make an empty database for the length of a block; what is connected then is cut off."""
        with ExitStack() as stack:
            stack.callback(self.drop, name)
            try:
                self._create(name)
            except Error:
                stack.pop_all()  # it was not made: a database of that name is another's
                raise
            self._make_schema(name)
            yield

    def drop(self, name: str) -> None:
        """Drop a database if it is there, even while processes are connected to it."""
        with self._cursor() as cursor:
            cursor.execute(CUT_OFF, [name])
            cursor.execute(f"DROP DATABASE IF EXISTS {cursor.db.ops.quote_name(name)}")

    def _make_schema(self, name: str) -> None:
        with self._cursor(name) as cursor:
            cursor.execute(MISSING_SCHEMA)
            for (schema,) in cursor.fetchall():
                cursor.execute(f"CREATE SCHEMA {cursor.db.ops.quote_name(schema)}")

    def _create(self, name: str) -> None:
        # Not from template1, which may hold tables, and must have no other visitor.
        with self._cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {cursor.db.ops.quote_name(name)} TEMPLATE template0")

    @contextmanager
    def _cursor(self, name: str = "") -> Iterator[Any]:
        """Open a connection to a database, by default the project's, for a short while.

        A signal to leave waits for so long: it would cancel the statement that makes or drops a database.
        """
        options = {"connect_timeout": CONNECT_SECONDS, **self.entry["OPTIONS"]}
        entry = {**self.entry, "NAME": name or self.entry["NAME"], "OPTIONS": options}
        handler = ConnectionHandler({DEFAULT_DB_ALIAS: entry})
        connection = handler[DEFAULT_DB_ALIAS]
        with undisturbed():
            try:
                with connection.cursor() as cursor:
                    yield cursor
            finally:
                connection.close()
