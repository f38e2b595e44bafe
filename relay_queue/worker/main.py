"""A worker process from its first step to its last: join, run the loop, leave."""

from __future__ import annotations

import signal
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from relay_queue import conf
from relay_queue.db.filename import make_all_absolute
from relay_queue.db.inherited import keep_from_children
from relay_queue.logs import get_logger
from relay_queue.store.dialects import dialect_for
from relay_queue.worker.database import SLICE_SECONDS, Outage
from relay_queue.worker.identity import NO_ROOM, Identity, register
from relay_queue.worker.loop import Loop
from relay_queue.worker.options import WorkerOptions
from relay_queue.worker.waiting import Waiting

logger = get_logger("relay_queue.worker")

MAX_PAUSE_SECONDS = 1.0
"""The longest pause between two attempts to join."""


def run(options: WorkerOptions, control: int) -> int:
    """Be a worker until told to stop; return the process's exit code.

    ``control`` is a socket to the supervisor: orders come in, ``READY`` goes out, and its end means
    that the supervisor is gone. Raises the database's error if the worker cannot register.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        # A signal to the whole group reaches the supervisor too, and it alone counts them. Not
        # SIG_IGN: programs that task functions start would inherit that.
        signal.signal(number, lambda *_: None)
    make_all_absolute(connections.all())  # before a function can change the working directory
    # A receiver of the start may have used a connection, and left it in whatever state.
    connections.close_all()
    connection_created.connect(_keep_from_children, dispatch_uid="relay_queue.worker.main")
    waiting = Waiting(control)
    identity = _join(options, waiting)
    if identity is None:
        return 0
    if identity.bell is not None:
        waiting.listen_to(identity.bell)
    loop = Loop(options, identity, waiting)
    try:
        return loop.run()
    finally:
        # The lock is the proof of our death. A process that leaves open leases behind must leave it,
        # too: it drops with the process, and the next prober ends the leases at once.
        identity.retire(keep_lock=not loop.left)


def _keep_from_children(*, connection: BaseDatabaseWrapper, **_: Any) -> None:
    """Note the connection of the loop or of a function; SQLite's has no descriptor to keep."""
    if hasattr(connection.connection, "fileno"):
        keep_from_children(connection.connection)


def _join(options: WorkerOptions, waiting: Waiting) -> Identity | None:
    """Register, however long the database is held, full or away; None if told to stop meanwhile.

    The supervisor's ready timeout does not count this time. Giving up here would count as a failed
    start, and a migration or a restart of the server would use up all of them.
    """
    connection = connections[conf.get().database]
    dialect = dialect_for(connection)
    outage, pause_seconds = Outage(logger), SLICE_SECONDS
    waiting.hold_up(True)  # before it is asked: some servers never answer
    while True:
        try:
            connection.ensure_connection()
            dialect.limit_wait(connection, SLICE_SECONDS)
            identity = register(options)
        except Error as error:
            trouble = dialect.diagnose(error)
            if trouble not in ("busy", "full", "lost"):
                raise
            outage.goes_on(error, trouble)
            if trouble == "lost":
                connection.close()
                pause_seconds = min(MAX_PAUSE_SECONDS, 2 * pause_seconds)
        except OSError as error:  # of the files beside the database
            if error.errno not in NO_ROOM:
                raise
            outage.goes_on(error, "full")
        else:
            waiting.hold_up(False)
            outage.is_over()
            return identity
        woken = waiting.wait(pause_seconds)
        if woken.drain or woken.quit:
            return None
