"""What differs between databases, as small named capabilities."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from relay_queue.exceptions import ConfigurationError
from relay_queue.store.dialects.base import Dialect, marks

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

# Imported when first needed: a project on SQLite has no driver of PostgreSQL.
_DIALECTS = {"postgresql": "PostgreSQLDialect", "sqlite": "SQLiteDialect"}


def dialect_for(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect of a connection, or raise `ConfigurationError` if there is none."""
    if connection.vendor not in _DIALECTS:
        raise ConfigurationError(
            f"Relay does not support {connection.vendor!r}, the database of alias "
            f"{connection.alias!r}; it supports {', '.join(sorted(_DIALECTS))}. "
            'Point RELAY["DATABASE"] at an alias that uses one of them.'
        )
    return _dialect(connection.vendor)


@cache
def _dialect(vendor: str) -> Dialect:
    module = import_module(f"relay_queue.store.dialects.{vendor}")
    dialect: Dialect = getattr(module, _DIALECTS[vendor])()
    return dialect


__all__ = ["Dialect", "dialect_for", "marks"]
