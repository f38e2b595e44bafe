"""Plain reads of the queue's database, outside of any transaction of the store."""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from relay_queue import conf
from relay_queue.store.dialects import Dialect, dialect_for


def connection() -> BaseDatabaseWrapper:
    """Return the connection to the queue's database."""
    return connections[conf.get().database]


def dialect() -> Dialect:
    """Return the dialect of the queue's database."""
    return dialect_for(connection())


def rows(statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """Run a statement that only reads and return its rows."""
    with connection().cursor() as cursor:
        cursor.execute(statement, params)
        return list(cursor.fetchall())
