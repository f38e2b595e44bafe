"""Plain reads of the queue's database, outside of any transaction of the store."""

from __future__ import annotations

from typing import Any

from django.db import connections

from relay_queue import conf
from relay_queue.store.dialects import Dialect, dialect_for


def dialect() -> Dialect:
    """Return the dialect of the queue's database."""
    return dialect_for(connections[conf.get().database])


def rows(statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """Run a statement that only reads and return its rows."""
    with connections[conf.get().database].cursor() as cursor:
        cursor.execute(statement, params)
        return list(cursor.fetchall())
