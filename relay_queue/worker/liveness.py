"""Who is alive: a lock that the kernel drops at a worker's death, `kill -9` included.

Each worker holds an exclusive `flock` on its own file in `<database>-workers/`, named by its
random incarnation id. Whoever locks that very inode has proof that the worker is dead.
Everything else proves nothing: a missing or another file says "unknown", and only the expiry of
its leases ends the worker's claims.

The files are never the database's own: closing one of those drops SQLite's locks.
"""

import enum
import os
import platform
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from relay_queue.db.beside import Folder
from relay_queue.validation import is_incarnation

try:
    import fcntl
except ImportError:  # Not a Unix. Nobody can hold or take a lock, so everything is unknown.
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
        # A fork between opening and remembering would leave the child a copy nobody closes.
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

    Taken after the fork that made the worker and before its row is written, so that no row ever
    names a file that a living worker has not locked.
    """

    def __init__(self, path: str, descriptor: _Descriptor | None) -> None:
        """Use `hold`."""
        self.path = path
        self._descriptor = descriptor
        self.identity = LockIdentity.of(descriptor.status()) if descriptor else NO_LOCK

    @classmethod
    def hold(cls, database_path: str, incarnation: str) -> "LivenessLock":
        """Create and lock the file of a worker's incarnation.

        Without `fcntl` no file is made and the identity is `NO_LOCK`: a file that nobody locks
        would look dead to a system that can. Raises `OSError` if the file exists or cannot be
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

        In that order nobody can find the file unlocked. In a forked child it does nothing.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or descriptor.number < 0:
            return
        with suppress(OSError):  # what cannot be removed is found dead later, and removed then
            _remove(self.path, descriptor)
        descriptor.close()


class Probe:
    """A verdict on one worker.

    While a DEAD probe is open it holds the dead worker's lock, so nobody else declares the
    same. Use as a context manager, or call `close`.
    """

    def __init__(self, path: str, verdict: Liveness, descriptor: _Descriptor | None = None) -> None:
        """Use `probe`."""
        self.path = path
        self.verdict = verdict
        self._descriptor = descriptor

    def bury(self) -> None:
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
    # An inode's number is used again only when no process has the old file open any more, so
    # a file that got the number of a removed one still cannot condemn a living worker.
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
