"""Who a worker is: a lock that proves it alive, a row that names it, a bell that wakes it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from dataclasses import dataclass

from django.db import DatabaseError

from relay_queue import conf, store, wakeup
from relay_queue.worker.liveness import LivenessLock, boot_id
from relay_queue.worker.options import WorkerOptions

logger = logging.getLogger("relay_queue.worker")


@dataclass(slots=True)
class Identity:
    """A registered worker. ``lock`` and ``bell`` are None where the database has no file."""

    worker_id: int
    incarnation: str
    database_path: str | None
    lock: LivenessLock | None
    bell: wakeup.Doorbell | None

    def sign_off(self, reason: str, wait_seconds: float) -> bool:
        """Mark the row as stopped; return whether that was committed."""
        try:
            with store.transaction(wait_seconds=wait_seconds, first=True) as tx:
                store.stop_workers(tx, [self.worker_id], reason)
        except DatabaseError as error:
            logger.warning("Could not mark the worker as stopped: %s", error)
            return False
        return True

    def retire(self, *, keep_lock: bool = False) -> None:
        """Take down the bell, and the lock unless it must prove the death of this process."""
        if self.bell is not None:
            self.bell.close()
        if self.lock is not None and not keep_lock:
            self.lock.release()


def register(options: WorkerOptions) -> Identity:
    """Lock first, then write the row: no row may name a file that a living worker has not locked.

    Raises ``OSError`` if the files beside the database cannot be made, or the database's error.
    """
    path = wakeup.database_path(conf.get().database)
    incarnation = secrets.token_hex(16)
    lock = None if path is None else LivenessLock.hold(path, incarnation)
    try:
        with store.transaction() as tx:
            worker_id = store.register_worker(tx, _describe(options, incarnation, lock))
        bell = None if path is None else _hang_bell(path, incarnation)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return Identity(worker_id, incarnation, path, lock, bell)


def _hang_bell(path: str, incarnation: str) -> wakeup.Doorbell | None:
    """Hang the bell, or live by looking now and then: slower, but nothing is lost."""
    try:
        return wakeup.Doorbell(path, incarnation)
    except OSError as error:
        logger.warning(
            "No doorbell beside %s (%s): work is noticed every %g s.",
            path,
            error,
            conf.get().poll_seconds,
        )
        return None


def _describe(
    options: WorkerOptions, incarnation: str, lock: LivenessLock | None
) -> store.NewWorker:
    return store.NewWorker(
        incarnation=incarnation,
        name=options.name,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        lock_device=None if lock is None else lock.identity.device,
        lock_inode=None if lock is None else lock.identity.inode,
        queues=options.queues or (),
        concurrency=options.concurrency,
    )
