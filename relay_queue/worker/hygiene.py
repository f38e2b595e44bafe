"""What is put right in a thread between two task functions: its database connections.

Not restored, because a thread cannot know who else relies on it: the working directory, the
environment, ``sys.path``, the locale of the C library, threads and processes that a function
started. Context variables, which Django keeps the active language and time zone in, need no
restoring: each function runs in a copy of the context.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger(__name__)


def clean_connections() -> list[str]:
    """Make this thread's connections fit for the next function.

    One that was left in a transaction, with autocommit changed, or broken is rolled back, closed
    and replaced. Any other is kept as long as Django keeps one between two requests: see
    ``CONN_MAX_AGE``. Returns the aliases of those whose transaction was still open: what was
    written there is not committed. Never raises.
    """
    left = []
    for connection in connections.all(initialized_only=True):
        try:
            connection.queries_log.clear()  # it would grow for ever under DEBUG
            if connection.connection is None and not connection.in_atomic_block:
                continue
            if _left_open(connection):
                left.append(connection.alias)
                _replace(connection)
            else:
                connection.close_if_unusable_or_obsolete()
        except Exception:  # noqa: BLE001 - a driver that cannot even be asked is broken
            _replace(connection)
    return left


def close_connections() -> list[str]:
    """Close this thread's connections for good, in whatever state they are. Never raises.

    Returns like `clean_connections`.
    """
    left = []
    for connection in connections.all(initialized_only=True):
        # A driver that cannot even be asked is broken, which is not the same as open.
        with suppress(Exception):
            if _left_open(connection):
                left.append(connection.alias)
        _replace(connection, quietly=True)
    return left


def _left_open(connection: BaseDatabaseWrapper) -> bool:
    return bool(
        connection.in_atomic_block
        or connection.closed_in_transaction
        or connection.needs_rollback
        or connection.autocommit != connection.settings_dict["AUTOCOMMIT"]
        # A BEGIN that went past Django shows only in the driver. Asking also finds a handle that
        # was closed past Django: the driver raises then.
        or getattr(connection.connection, "in_transaction", False)
        or _status(connection.connection)
    )


def _status(raw: Any) -> int:
    """Return where psycopg's connection is in a transaction, 0 outside; 0 for other drivers."""
    return int(getattr(getattr(raw, "info", None), "transaction_status", 0))


def _replace(connection: BaseDatabaseWrapper, *, quietly: bool = False) -> None:
    """Roll back, close, and forget the connection; the next use of its alias opens a new one."""
    if not quietly:
        with suppress(Exception):  # a log handler may raise
            logger.warning(
                "a task function left the connection %r unusable or in a transaction; "
                "it was rolled back and closed",
                connection.alias,
            )
    # Django refuses to roll back or to close inside of a block, and the block's owner is gone.
    connection.in_atomic_block = False
    connection.closed_in_transaction = False
    connection.needs_rollback = False
    connection.savepoint_ids.clear()
    connection.atomic_blocks.clear()
    for put_right in (connection.rollback, connection.close):
        with suppress(Exception):
            put_right()
    with suppress(AttributeError):
        del connections[connection.alias]
