"""What is done to a PostgreSQL database from outside of Relay: locks, triggers, connections cut.

A server keeps its files to itself. What it says when they fail, it can be made to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.db import connection

from relay_queue.drill.means import Means
from relay_queue.models import Job, Lease

ALTER: Final = f"UPDATE {Job._meta.db_table} SET payload = replace(payload, %s, %s)"

LOCK: Final = f"LOCK TABLE {Lease._meta.db_table} IN EXCLUSIVE MODE"
"""Leave others the reading, and make all who would write, or hold a row, wait."""

FAIL: Final = """
    CREATE FUNCTION drill_fault() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF (SELECT {condition} FROM pg_stat_activity WHERE pid = pg_backend_pid()) THEN
            RAISE EXCEPTION 'the drill lets this fail' USING ERRCODE = '{condition_name}';
        END IF;
        RETURN NULL;
    END $$
"""
"""Make the server report an error to some of its sessions: with the code that it has for it."""

ARM: Final = f"""
    CREATE TRIGGER drill_fault BEFORE INSERT OR UPDATE ON {Lease._meta.db_table}
    FOR EACH STATEMENT EXECUTE FUNCTION drill_fault()
"""
"""Let it strike when outcomes are settled or leases granted."""

DISARM: Final = "DROP FUNCTION drill_fault() CASCADE"

NOW: Final = "SELECT clock_timestamp()::text"

CUT: Final = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
"""End all connections but our own, as an administrator does, or a firewall."""


class ServerMeans(Means):
    """Plain SQL, as anybody may send it who can connect."""

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
        """Let the server report a full disk to all."""
        self._arm("true", "disk_full")
        yield
        _run(DISARM)

    def break_writes(self, pid: int) -> bool:
        """Let the server report an I/O error to those who are connected now.

        A process that is started in the place of one of these has sessions of its own.
        """
        ((now,),) = _run(NOW)
        self._arm(f"backend_start < '{now}'", "io_error")
        return True

    def cut_connections(self) -> int:
        """Let the server end them."""
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
