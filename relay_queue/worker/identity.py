"""The identity of a worker: a lock that proves it alive, its row, a bell that wakes it."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from dataclasses import dataclass

from django.db import Error

from relay_queue import __version__, conf, store, wakeup
from relay_queue.db.filename import database_path
from relay_queue.logs import get_logger
from relay_queue.store.workers import lock_key
from relay_queue.worker.database import SLICE_SECONDS
from relay_queue.worker.liveness import LivenessLock, boot_id
from relay_queue.worker.options import WorkerOptions

logger = get_logger("relay_queue.worker")

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the system says when a disk, or a share of it, is full."""


@dataclass(slots=True)
class Identity:
    """A registered worker.

    On a database that is a file it holds the ``lock`` of a file; on a server, its ``session`` is
    both lock and bell. Without either, only the expiry of its leases tells that it is dead.
    """

    worker_id: int
    registered: store.NewWorker
    lock: LivenessLock | None
    session: wakeup.Session | None
    bell: wakeup.Bell | None

    @property
    def is_proven(self) -> bool:
        """Whether no other worker can prove this one dead now. Otherwise it must not claim."""
        return self.session is None or self.session.held

    def has_come_back(self) -> bool:
        """Say, once, that the lock was lost and is ours again: others may hold us for dead."""
        if self.session is None or not self.session.regained:
            return False
        self.session.regained = False
        return True

    def sign_off(self, reason: str, wait_seconds: float) -> bool:
        """Mark the row as stopped; return whether that was committed."""
        try:
            with store.transaction(wait_seconds=wait_seconds, first=True) as tx:
                store.stop_workers(tx, [self.worker_id], reason)
        except Error as error:
            logger.warning("Could not mark the worker as stopped: %s", error)
            return False
        return True

    def retire(self, *, keep_lock: bool = False) -> None:
        """Take down the bell, and the lock unless it must prove the death of this process."""
        if self.bell is not None and self.bell is not self.session:
            self.bell.close()
        if keep_lock:
            return
        for lock in (self.lock, self.session):
            if lock is not None:
                lock.release()


def register(options: WorkerOptions) -> Identity:
    """Lock first, then write the row: no row may name a lock that a living worker does not hold.

    Raises ``OSError`` if there is no room for the files beside the database, or its error.
    """
    using = conf.get().database
    incarnation = secrets.token_hex(16)
    path = database_path(using)
    key = lock_key(incarnation)
    assert key is not None, "it was drawn a moment ago"
    session = wakeup.open_session(using, key)
    lock = None
    try:
        lock = None if path is None else _hold_lock(path, incarnation)
        with store.transaction(wait_seconds=SLICE_SECONDS) as tx:
            described = _describe(options, incarnation, lock, session)
            worker_id = store.register_worker(tx, described)
        bell = session if path is None else _open_bell(path, incarnation)
    except BaseException:
        for held in (lock, session):
            if held is not None:
                held.release()
        raise
    return Identity(worker_id, described, lock, session, bell)


def _hold_lock(path: str, incarnation: str) -> LivenessLock | None:
    """Lock a file, or go on without a proof of death: leases then end only when they expire."""
    try:
        return LivenessLock.hold(path, incarnation)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        logger.warning(
            "No worker file beside %s (%s): if this process dies, nobody knows before its leases "
            "expire.",
            path,
            error,
        )
        return None


def _open_bell(path: str, incarnation: str) -> wakeup.Bell | None:
    """Open the bell, or go on by polling: slower, but nothing is lost."""
    settings = conf.get()
    if settings.wakeup == "poll":
        return None
    try:
        return wakeup.Doorbell(path, incarnation)
    except OSError as error:
        logger.warning(
            "No doorbell beside %s (%s): work is noticed every %g s.",
            path,
            error,
            settings.poll_seconds,
        )
        return None


def _describe(
    options: WorkerOptions,
    incarnation: str,
    lock: LivenessLock | None,
    session: wakeup.Session | None,
) -> store.NewWorker:
    return store.NewWorker(
        incarnation=incarnation,
        name=options.name,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        lock_device=None if lock is None else lock.identity.device,
        lock_inode=None if lock is None else lock.identity.inode,
        session_lock=session is not None,
        queues=options.queues or (),
        exclude_queues=options.exclude_queues if options.queues is None else (),
        concurrency=options.concurrency,
        version=__version__,
    )
