"""What is reset in a thread between two task functions: its database connections.

Some state is not reset, because other threads may rely on it: the working directory, the
environment, ``sys.path``, the locale of the C library, ``threading.local``, threads and processes
that a function started. For the connections of other threads see `relay_queue.worker.threads`.

Context variables need no reset: each job runs in a copy of the context, its signals included.
Django keeps the active language and time zone in them.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from relay_queue.logs import get_logger

logger = get_logger(__name__)


def close_connections() -> list[str]:
    """Close this thread's connections, in whatever state they are. Never raises.

    The next use of an alias opens a new one, whatever ``CONN_MAX_AGE`` says: the state of a session
    cannot be reset as a whole. The next function would find the search path, role, time zone,
    read-only mode, temporary tables and advisory locks of this one. Returns the aliases of those
    whose transaction was still open: what was written there is not committed.
    """
    return [c.alias for c in connections.all(initialized_only=True) if _close(c)]


def undo_what_is_left_open() -> list[str]:
    """Close only those of this thread's connections that are in a transaction. Never raises.

    Returns like `close_connections`.
    """
    known = connections.all(initialized_only=True)
    return [c.alias for c in known if is_left_open(c) and _close(c)]


def is_left_open(connection: BaseDatabaseWrapper) -> bool:
    """Whether a connection that no block is around is in a transaction all the same."""
    if connection.connection is None and not connection.in_atomic_block:
        return False
    try:
        return _is_in_transaction(connection)
    except Exception:  # noqa: BLE001 - a driver that cannot even be asked is broken, not open
        return False


def _is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
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


def _close(connection: BaseDatabaseWrapper) -> bool:
    """Roll back, close and forget the connection; return whether it was in a transaction."""
    if connection._thread_ident != threading.get_ident():  # type: ignore[attr-defined]
        # Lent by another thread, which goes on with it.
        del connections[connection.alias]
        return False
    left = is_left_open(connection)
    if left:
        with suppress(Exception):  # a log handler may raise
            logger.warning(
                "a task function left the connection %r in a transaction; "
                "it was rolled back and closed",
                connection.alias,
            )
        _leave_blocks(connection)
    with suppress(Exception):
        if connection.settings_dict["OPTIONS"].get("pool") and connection.connection is not None:
            # A pool would hand it to the next function as it is. It replaces one that is closed.
            connection.connection.close()
        connection.close()
    with suppress(AttributeError):
        del connections[connection.alias]
    return left


def _leave_blocks(connection: BaseDatabaseWrapper) -> None:
    # Django refuses to roll back or to close inside of a block, and the block's owner is gone.
    connection.in_atomic_block = False
    connection.closed_in_transaction = False
    connection.needs_rollback = False
    connection.savepoint_ids.clear()
    connection.atomic_blocks.clear()
    with suppress(Exception):
        connection.rollback()
