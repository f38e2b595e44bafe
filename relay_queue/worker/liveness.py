"""Which workers are alive: a lock that the kernel drops at a worker's death, `kill -9` included.

Each worker holds an exclusive `flock` on its own file in `<database>-workers/`, named by its
random incarnation id. A process that can lock that very inode has proof that the worker is dead.
Everything else proves nothing: a missing or another file says "unknown", and only the expiry of
its leases ends the worker's claims. On a server a session's advisory lock takes the file's place.

The files are never the database's own: closing one of those drops SQLite's locks.
"""

from __future__ import annotations

import enum
import os
import platform
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TypeVar

from relay_queue import store
from relay_queue.db.beside import Folder
from relay_queue.db.filename import database_path
from relay_queue.query import looks
from relay_queue.query.looks import OtherWorker
from relay_queue.store.operate import BATCH
from relay_queue.store.records import Recovered
from relay_queue.store.workers import RESTART_GRACE_SECONDS, lock_key, take_locks
from relay_queue.validation import is_incarnation

try:
    import fcntl
except ImportError:  # Not a Unix: no process can hold or take a lock, so every worker is unknown.
    fcntl = None  # type: ignore[assignment]

WORKERS_SUFFIX = "-workers"
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
LARGEST_STORED = 2**63 - 1

Key = TypeVar("Key")


class Liveness(enum.Enum):
    """What a probe could prove about a worker."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class LockIdentity:
    """Which file a worker locked, as stored on its row. Two zeros: it holds no lock."""

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the identity in a `stat` result, cut to what a signed 64-bit column holds."""
        return cls(status.st_dev & LARGEST_STORED, status.st_ino & LARGEST_STORED)


NO_LOCK = LockIdentity(0, 0)


class _Descriptor:
    """An open file that a forked child closes at once.

    A child that kept it would keep the lock too, and with it a dead parent "alive" or a dead
    worker impossible to recover. The lock is never dropped by `LOCK_UN`, which a child could do
    to its parent: it goes with the last descriptor. Programs that a job starts never get it,
    since `os.open` closes on exec.
    """

    def __init__(self, folder: Folder, name: str, flags: int) -> None:
        # A fork between opening and remembering would leave the child a copy that is never closed.
        with _fork_guard:
            self.number = os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder.number)
            _descriptors.add(self)

    def lock(self) -> bool:
        """Take the exclusive lock if it is free, and say whether it was."""
        try:
            fcntl.flock(self.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def status(self) -> os.stat_result:
        return os.fstat(self.number)

    def close(self) -> None:
        with _fork_guard:
            number, self.number = self.number, -1
            if number >= 0:
                _descriptors.discard(self)
                os.close(number)


class LivenessLock:
    """The lock a worker holds for its life.

    Taken after the fork that made the worker, and before its row is written. So no row ever names a
    file that a living worker has not locked.
    """

    def __init__(self, path: str, descriptor: _Descriptor | None) -> None:
        """Use `hold`."""
        self.path = path
        self._descriptor = descriptor
        self.identity = LockIdentity.of(descriptor.status()) if descriptor else NO_LOCK

    @classmethod
    def hold(cls, database_path: str, incarnation: str) -> LivenessLock:
        """Create and lock the file of a worker's incarnation.

        Without `fcntl` no file is made and the identity is `NO_LOCK`: a file that is never locked
        would look dead to a system that can lock. Raises `OSError` if the file exists or cannot be
        made or locked.
        """
        if fcntl is None:
            return cls(_lock_path(database_path, incarnation), None)
        path = _lock_path(database_path, incarnation)
        name = os.path.basename(os.path.dirname(path))
        with Folder.of(database_path) as beside, beside.folder(name) as folder:
            descriptor = _Descriptor(folder, incarnation, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                if not descriptor.lock():
                    raise BlockingIOError(
                        f"the new worker file {path!r} is locked by another process"
                    )
                folder.share(descriptor.number)
            except BaseException:
                folder.remove(incarnation)
                descriptor.close()
                raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Remove the file, then drop the lock: a clean stop. May be called twice.

        In that order no prober can find the file unlocked. In a forked child it does nothing.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or descriptor.number < 0:
            return
        with suppress(OSError):  # what cannot be removed is found dead later, and removed then
            _remove(self.path, descriptor)
        descriptor.close()


class Probe:
    """A verdict on one worker.

    While a DEAD probe is open it holds the dead worker's lock, so no other prober declares the
    same worker dead. Use as a context manager, or call `close`.
    """

    def __init__(self, path: str, verdict: Liveness, descriptor: _Descriptor | None = None) -> None:
        """Use `probe`."""
        self.path = path
        self.verdict = verdict
        self._descriptor = descriptor

    def remove(self) -> None:
        """Remove the dead worker's file. Call only after its recovery has committed.

        Earlier, a failed recovery would leave nothing to prove the death by. Raises
        `ValueError` unless this probe is open and its verdict is DEAD.
        """
        if self._descriptor is None or self._descriptor.number < 0:
            raise ValueError(
                f"cannot remove {self.path!r}: the probe is closed or its verdict is "
                f"{self.verdict.value!r}; only an open probe of a dead worker may"
            )
        _remove(self.path, self._descriptor)

    def close(self) -> None:
        """Let the lock go and leave the file. May be called twice."""
        if self._descriptor is not None:
            self._descriptor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def probe(database_path: str, incarnation: str, identity: LockIdentity) -> Probe:
    """Find out whether the worker that locked the file `identity` is dead.

    Creates nothing and raises no `OSError`: what cannot be examined is UNKNOWN, and so is a worker
    whose incarnation is not one.
    """
    if not is_incarnation(incarnation):  # an altered row, which may name any file there is
        return Probe("", Liveness.UNKNOWN)
    path = _lock_path(database_path, incarnation)
    if fcntl is None or identity == NO_LOCK:
        return Probe(path, Liveness.UNKNOWN)
    try:
        with Folder.at(os.path.dirname(path), _model(database_path)) as folder:
            # Non-blocking, so that a pipe put in the file's place cannot hang the prober.
            descriptor = _Descriptor(folder, incarnation, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return Probe(path, Liveness.UNKNOWN)
    verdict = Liveness.UNKNOWN
    try:
        with suppress(OSError):
            verdict = _verdict(descriptor, identity)
    finally:
        if verdict is not Liveness.DEAD:
            descriptor.close()
    return Probe(path, verdict, descriptor if verdict is Liveness.DEAD else None)


def boot_id() -> str:
    """Return an id of this boot of the machine, or its host name. For display only."""
    try:
        with open(BOOT_ID_PATH, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def _lock_path(database_path: str, incarnation: str) -> str:
    return os.path.join(os.path.realpath(database_path) + WORKERS_SUFFIX, incarnation)


def _model(database_path: str) -> os.stat_result | None:
    try:
        return os.stat(database_path)
    except FileNotFoundError:
        return None


def _remove(path: str, descriptor: _Descriptor) -> None:
    """Remove the file, if it is still the one that is open. Raises `OSError`."""
    directory, name = os.path.split(path)
    status = descriptor.status()
    with suppress(FileNotFoundError), Folder.seen(directory) as folder:
        if folder.identity(name) == (status.st_dev, status.st_ino):
            folder.remove(name)


def _verdict(descriptor: _Descriptor, identity: LockIdentity) -> Liveness:
    # An inode's number is used again only when no process has the old file open any more. So a
    # file with the number of a removed one is no proof against a living worker.
    if LockIdentity.of(descriptor.status()) != identity:
        return Liveness.UNKNOWN
    if not descriptor.lock():
        return Liveness.ALIVE
    # Removed between our opening and our lock: stopped cleanly, or recovered by someone else.
    return Liveness.DEAD if descriptor.status().st_nlink else Liveness.UNKNOWN


_descriptors: set[_Descriptor] = set()
# Re-entrant, so that a signal handler that forks does not wait for the thread it interrupted.
_fork_guard = threading.RLock()


def _close_in_child() -> None:
    try:
        for descriptor in list(_descriptors):
            descriptor.close()
    finally:
        _fork_guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_fork_guard.acquire,
        after_in_parent=_fork_guard.release,
        after_in_child=_close_in_child,
    )


CONFIRM_SECONDS = 0.25
"""How long a session's lock must be seen free: a worker that lost its connection is back sooner."""

STOP_REASON = "died: its lock was free"


WATCHED = 3
"""How many living workers each worker watches: those behind it in the ring of all ids, and the dead
between them. So each death is seen by three workers, of which some may be stopped. The work of all
workers grows with their number and not with its square."""


class Proof(Protocol):
    """What proves that a worker is dead."""

    def remove(self) -> None:
        """Remove what is left of the dead worker, after the commit of its recovery."""

    def close(self) -> None:
        """Let the proof go. May be called twice."""


@dataclass(frozen=True, slots=True)
class FreeSession:
    """A session's lock that was seen free. It counts once the recovering transaction takes it."""

    key: int

    def remove(self) -> None:
        """Do nothing: the lock went with the session."""

    def close(self) -> None:
        """Hold nothing outside of a transaction."""


@dataclass(slots=True)
class DeadWorkers:
    """Workers proven dead, kept until their leases have been ended."""

    probes: dict[int, Proof] = field(default_factory=dict)
    left: bool = False
    suspects: dict[int, float] = field(default_factory=dict)
    """Since when the session lock of a worker has been seen free, in monotonic seconds."""

    _trust_from: float = 0.0

    def find(self, using: str, own_id: int, *, watched: float = WATCHED) -> None:
        """Probe the workers behind our own in the ring, until ``watched`` of them live.

        Of each run of dead workers the three living ones before it see all. A worker in another
        container can be neither proven dead nor seen to live. It is passed by, since it could not
        prove the death of those behind it either. Reads only, and needs no gate.
        """
        path = database_path(using)
        free: dict[int, float] = {}
        living = 0
        for worker in looks.live_workers(but=own_id):
            if worker.worker_id not in self.probes and self._lives(worker, path, free):
                living += 1
                if living >= watched:
                    break
        self.suspects = free

    def suspend_judgement(self) -> None:
        """Judge no session for a while: we lost our own connection, and others may have, too."""
        self.suspects.clear()
        self._trust_from = time.monotonic() + RESTART_GRACE_SECONDS

    def recover(
        self, tx: store.Transaction, *, trial: store.Trial | None = None
    ) -> list[Recovered]:
        """End their leases, at most ``BATCH``; mark them as stopped once none is left."""
        dead = self._still_dead(tx)
        ended = store.recover_dead(tx, dead, BATCH, trial=trial)
        # In a trial, jobs were marked as unreadable or left as they are: those are not in `ended`.
        self.left = len(ended) >= BATCH if trial is None else bool(ended or trial.faults)
        if not self.left:
            store.stop_workers(tx, dead, STOP_REASON)
        return ended

    def forget(self) -> None:
        """Forget them, after the commit of a `recover` that has left no lease open."""
        if self.left:
            return
        for proof in self.probes.values():
            with suppress(OSError):  # a file that may not be removed is found dead once more
                proof.remove()
        self.close()

    def close(self) -> None:
        """Let their locks go, so that another worker may recover what we have not."""
        for proof in self.probes.values():
            proof.close()
        self.probes.clear()

    def _lives(self, worker: OtherWorker, path: str | None, free: dict[int, float]) -> bool:
        """Probe one worker, note if it is dead, and say whether it is known to live."""
        if worker.session_lock:
            return self._session_lives(worker, free)
        if path is None or worker.lock_device is None or worker.lock_inode is None:
            return False
        identity = LockIdentity(worker.lock_device, worker.lock_inode)
        found = probe(path, worker.incarnation, identity)
        if found.verdict is Liveness.DEAD:
            self.probes[worker.worker_id] = found
        return found.verdict is Liveness.ALIVE

    def _session_lives(self, worker: OtherWorker, free: dict[int, float]) -> bool:
        now = time.monotonic()
        if now < self._trust_from:
            return True  # no session is judged for a while
        key = lock_key(worker.incarnation)
        if key is None:
            return False
        if not looks.unlocked([key]):
            return True
        since = self.suspects.get(worker.worker_id, now)
        if now - since >= CONFIRM_SECONDS:
            self.probes[worker.worker_id] = FreeSession(key)
        else:
            free[worker.worker_id] = since
        return False

    def _still_dead(self, tx: store.Transaction) -> list[int]:
        """Return which workers are dead in this transaction: sessions are judged under their locks."""
        keys = {w: proof.key for w, proof in self.probes.items() if isinstance(proof, FreeSession)}
        taken = take_locks(tx, list(keys.values()))
        return [w for w in self.probes if w not in keys or keys[w] in taken]
