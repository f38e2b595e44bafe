"""The gate's two files: who may write now, who is next, and the note naming the holder.

Only this module calls ``flock``. It keeps no account of who asked: that is ``gate.py``.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from relay_queue.db.beside import Folder

try:
    import fcntl
except ImportError:  # Windows: every database is ungated there.
    fcntl = None  # type: ignore[assignment]

SUPPORTED = fcntl is not None
"""Whether this system has ``flock`` at all."""

GET_GENERATION = 0x80087601
"""The system's call for the generation of an inode (FS_IOC_GETVERSION), on 64 bits."""

RECORD_BYTES = 96
SIZES = (0, RECORD_BYTES)
BOOT_ID = "/proc/sys/kernel/random/boot_id"
LOCKS = "/proc/locks"
"""Where the system lists who holds which lock."""


@dataclass(frozen=True)
class Holder:
    """Who holds a gate: process id, thread name, and since when (seconds since the epoch)."""

    pid: int
    thread: str | None
    since: float

    def __str__(self) -> str:
        thread = f" (thread {self.thread})" if self.thread else ""
        held = max(0.0, time.time() - self.since)
        return f"process {self.pid}{thread}, for {held:.1f} s"


class LogOwner(NamedTuple):
    """A database's log and the inode of the file that it belongs to, noted in this boot.

    The log is named as `identity_of_log` does.
    """

    log: str
    file: int


class GateFile:
    """The lock files beside one database.

    ``<database>-gate`` is locked by the process that may write. ``<database>-gate-next`` is locked
    by the one process that waits for it; its text notes whose log lies beside the database. Without
    the second file, a process that lets the gate go and asks again wins against waiters that must
    first wake up. Measured with four saturated processes, one of them wrote 1,457 times in a row.

    A lock belongs to the open file description, so all threads of the process share it. The
    caller must make sure that only one of them works on it at a time.
    """

    def __init__(self, database: str) -> None:
        self.database = database
        self.path = f"{database}-gate"
        self._gate = -1
        self._next = -1
        self._pid = 0

    def open(self) -> None:
        """Open the files, or make them for those who may write the database.

        Raises ``OSError``, also if something else is in their place. See `Folder.file`.
        """
        if self._gate >= 0:
            return
        name = os.path.basename(self.path)
        with Folder.of(self.database) as folder:
            self._next = folder.file(f"{name}-next", SIZES)
            try:
                self._gate = folder.file(name, SIZES)
            except OSError:
                self.close()
                raise
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the descriptors. After a fork this leaves the parent's locks in place."""
        descriptors = (self._gate, self._next)
        self._gate = self._next = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)

    def try_lock(self) -> bool:
        """Take the gate if it is free and no other process waits for it."""
        if not _try_flock(self._next):
            return False
        try:
            return _try_flock(self._gate)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def try_lock_ahead(self) -> bool:
        """Take the gate if it is free, even if a process waits for it, or if it is ours already."""
        return _try_flock(self._gate)

    def lock(self) -> None:
        """Wait for the gate as long as it takes. Raises ``OSError`` if locks do not work here."""
        fcntl.flock(self._next, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._gate, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def unlock(self) -> None:
        """Let the gate go. Harmless if it is not held."""
        # A descriptor that other code has closed took the lock with it.
        with suppress(OSError):
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def write_holder(self, thread: str, since: float) -> None:
        """Note who holds the gate, for the error messages of those who wait."""
        text = f"{self._pid} {since:.6f} {thread}".encode(errors="replace")
        _write_note(self._gate, text)

    def read_holder(self) -> Holder | None:
        """Return who holds the gate, in any process; None if it is free, or if that is not sure.

        The note outlives its writer, and a holder may have left none. So it is believed only if
        the system says that this process has the lock: an operator may act on the name.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            probe = os.open(self.path, flags)
        except OSError:
            return None
        try:
            if _try_flock(probe, exclusive=False):
                return None
            noted = _parse_note(os.pread(probe, RECORD_BYTES, 0))
            owners = _lock_owners(os.fstat(probe).st_ino)
        except OSError:
            return None
        finally:
            os.close(probe)
        return noted if noted is not None and noted.pid in owners else None

    def write_log_owner(self, file_inode: int) -> bool:
        """Note that the log belongs to the file with this inode; whether there is a log yet."""
        log = identity_of_log(self.database)
        if log is None:
            return False
        _write_note(self._next, f"{log} {file_inode} {_boot_id()}".encode())
        return True

    def forget_log_owner(self) -> None:
        """Forget whose log was noted, if there is no log any more: the next one is another."""
        if self._next >= 0 and not os.path.exists(f"{self.database}-wal"):
            _write_note(self._next, b"")

    def read_log_owner(self) -> LogOwner | None:
        """Return whose log was noted last, in this boot; None if that is not known."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            note = os.open(f"{self.path}-next", flags)
        except OSError:
            return None
        try:
            log, file, boot = os.pread(note, RECORD_BYTES, 0).decode("ascii").split()
            return LogOwner(log, int(file)) if boot == _boot_id() else None
        except (OSError, ValueError):  # also one that was never written, or is damaged
            return None
        finally:
            os.close(note)


def identity_of_log(database: str) -> str | None:
    """Return what no other file beside ``database`` has been called in this boot: its log, if any.

    An inode's number alone does not do: the system gives the number of a deleted log to the next
    file. Its generation differs then, on file systems that have one. Opening the log drops no lock:
    SQLite holds those of a log on its index.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        log = os.open(f"{database}-wal", flags)
    except OSError:
        return None
    try:
        inode = os.fstat(log).st_ino
        generation = b""
        with suppress(OSError):
            generation = fcntl.ioctl(log, GET_GENERATION, bytes(8))
        return f"{inode}.{generation.hex()}"
    except OSError:
        return None
    finally:
        os.close(log)


def _write_note(descriptor: int, text: bytes) -> None:
    # One write of a fixed size: a reader never sees the tail of a longer, older note.
    with suppress(OSError):
        os.pwrite(descriptor, text[: RECORD_BYTES - 1].ljust(RECORD_BYTES - 1) + b"\n", 0)


@cache
def _boot_id() -> str:
    """Return an id of this boot of the machine; where there is none, nothing matches it."""
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _try_flock(descriptor: int, *, exclusive: bool = True) -> bool:
    """Lock without waiting; say whether that worked."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_owners(inode: int) -> set[int]:
    """Return the processes that hold an exclusive ``flock`` on a file with this inode.

    Those of another container are not listed. Their numbers would name other processes here. Raises
    ``OSError`` where the system has no such list.
    """
    with open(LOCKS, encoding="ascii", errors="replace") as lines:
        # Such as ``1: FLOCK  ADVISORY  WRITE 4711 fe:00:2146689 0 EOF``; a waiter has ``->``.
        fields = [line.split() for line in lines]
    return {
        int(field[4])
        for field in fields
        if field[1] == "FLOCK" and field[3] == "WRITE" and field[5].endswith(f":{inode}")
    }


def _parse_note(raw: bytes) -> Holder | None:
    """Read the note back; None if it was never written or is damaged."""
    pid, _, rest = raw.decode(errors="replace").strip().partition(" ")
    since, _, thread = rest.partition(" ")
    try:
        return Holder(pid=int(pid), thread=thread or None, since=float(since))
    except ValueError:
        return None
