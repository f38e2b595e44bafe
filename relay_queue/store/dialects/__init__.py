"""What differs between databases, as small named capabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay_queue.exceptions import ConfigurationError
from relay_queue.store.dialects.base import Dialect
from relay_queue.store.dialects.sqlite import SQLiteDialect

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_DIALECTS: dict[str, Dialect] = {"sqlite": SQLiteDialect()}


def dialect_for(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect of a connection, or raise `ConfigurationError` if there is none."""
    try:
        return _DIALECTS[connection.vendor]
    except KeyError:
        raise ConfigurationError(
            f"Relay does not support {connection.vendor!r}, the database of alias "
            f"{connection.alias!r}; it supports {', '.join(sorted(_DIALECTS))}. "
            'Point RELAY["DATABASE"] at an alias that uses one of them.'
        ) from None


__all__ = ["Dialect", "dialect_for"]
