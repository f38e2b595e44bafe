"""How an idle worker hears of work: a process that commits some rings every worker's bell.

A verb of the store notes that workers should hear of what it did (`Transaction.wake`). The store's
transaction rings here once it is committed, so that no caller has to.

A ring carries no information and may be lost: workers also look at the queue every few seconds.
What a bell is depends on the database: a socket beside an SQLite file (`doorbell`), or a
notification of PostgreSQL (`session`). With ``RELAY["WAKEUP"]`` set to
``"poll"`` there is no ring, and no worker listens.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from django.db import connections, transaction

from relay_queue import conf
from relay_queue.db.filename import file_of_connection
from relay_queue.store.dialects import dialect_for
from relay_queue.store.transaction import wake_by
from relay_queue.wakeup import doorbell
from relay_queue.wakeup.doorbell import Doorbell
from relay_queue.wakeup.session import Session, notify

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_last_hook = threading.local()


class Bell(Protocol):
    """The listening end, one per worker process."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a ring; it stays the same."""

    def clear(self) -> int:
        """Take the pending rings off the bell and return how many there were."""

    def close(self) -> None:
        """Take the bell down. May be called twice."""


def ring(using: str) -> None:
    """Ring the workers of the queue on alias `using`. Never raises."""
    if conf.get().wakeup == "poll":
        return
    connection = connections[using]
    if dialect_for(connection).has_sessions:
        notify(using)
        return
    path = file_of_connection(connection)
    if path is not None:
        doorbell.ring(path)


def ring_on_commit(using: str) -> None:
    """Ring once when the transaction on alias `using` commits, or now if there is none.

    Any number of calls in one transaction make one ring. Rolled back work does not ring. Does
    nothing if the database has no bells, or if autocommit was turned off by hand, where the
    moment of the commit cannot be known.
    """
    connection = connections[using]
    if not connection.in_atomic_block:
        if connection.get_autocommit():
            ring(using)
        return
    if not _has_bells(connection):
        return
    # Django drops the hooks of a rolled back savepoint, so a flag "already asked" could outlive its
    # hook. The test for the hook itself, where it was put, cannot be wrong.
    hooks = connection.run_on_commit
    place, hook = getattr(_last_hook, "entry", (0, None))
    if place < len(hooks) and hooks[place][1] is hook:
        return
    _last_hook.entry = (len(hooks), partial(ring, using))
    transaction.on_commit(_last_hook.entry[1], using=using, robust=True)


def _ring_behind(using: str) -> None:
    """Ring after a transaction of the store, or after the commit that it was a part of."""
    ring_on_commit(using)


wake_by(_ring_behind)


def open_session(using: str, lock_key: int) -> Session | None:
    """Open a worker's own session, where the database has such and the settings allow it.

    Raises the database's error.
    """
    if conf.get().wakeup == "poll" or not dialect_for(connections[using]).has_sessions:
        return None
    return Session(using, lock_key)


def _has_bells(connection: BaseDatabaseWrapper) -> bool:
    if conf.get().wakeup == "poll":
        return False
    return dialect_for(connection).has_sessions or file_of_connection(connection) is not None


__all__ = ["Bell", "Doorbell", "Session", "open_session", "ring", "ring_on_commit"]
