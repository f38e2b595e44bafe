"""The gate's two files: who may write now, who is next, and the note naming the holder.

Only this module calls ``flock``. It keeps no account of who asked: that is ``gate.py``.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass

try:
    import fcntl
except ImportError:  # Windows: every database is ungated there.
    fcntl = None  # type: ignore[assignment]

SUPPORTED = fcntl is not None
"""Whether this system has ``flock`` at all."""

RECORD_BYTES = 96
DEFAULT_MODE = 0o644


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


class GateFile:
    """The lock files beside one database.

    ``<database>-gate`` is locked by whoever may write. ``<database>-gate-next`` is locked by
    the one process that waits for it. Without the second file a process that lets the gate go
    and asks again at once wins against waiters that must first wake up: measured with four
    saturated processes, one of them wrote 1,457 times in a row.

    A lock belongs to the open file description, so all threads of the process share it. The
    caller must make sure that only one of them works on it at a time.
    """

    def __init__(self, database: str) -> None:
        self.database = database
        self.path = f"{database}-gate"
        self._gate = -1
        self._next = -1
        self._note = -1
        self._pid = 0

    def open(self) -> None:
        """Open the files, creating them with the database's mode. Raises ``OSError``."""
        if self._gate >= 0:
            return
        self._next = _open_like(self.database, f"{self.path}-next")
        try:
            self._gate = _open_like(self.database, self.path)
        except OSError:
            self.close()
            raise
        # A user who may lock but not write still takes part; only the holder's name is lost.
        with suppress(OSError):
            self._note = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the descriptors. After a fork this leaves the parent's locks in place."""
        descriptors = (self._gate, self._next, self._note)
        self._gate = self._next = self._note = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)

    def try_lock(self) -> bool:
        """Take the gate if it is free and nobody else waits for it."""
        if not _try_flock(self._next):
            return False
        try:
            return _try_flock(self._gate)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def try_lock_ahead(self) -> bool:
        """Take the gate if it is free, even if somebody waits for it, or if it is ours already."""
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
        # A descriptor that somebody closed behind our back took the lock with it.
        with suppress(OSError):
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def write_holder(self, thread: str, since: float) -> None:
        """Note who holds the gate, for the error messages of those who wait."""
        if self._note < 0:
            return
        text = f"{self._pid} {since:.6f} {thread}".encode(errors="replace")
        # One write of a fixed size: a reader never sees the tail of a longer, older note.
        with suppress(OSError):
            os.pwrite(self._note, text[: RECORD_BYTES - 1].ljust(RECORD_BYTES - 1) + b"\n", 0)

    def read_holder(self) -> Holder | None:
        """Return who holds the gate, in whatever process, or None if nobody does."""
        try:
            probe = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            # The note outlives its writer; only a lock that cannot be had proves a holder.
            if _try_flock(probe, exclusive=False):
                return None
            return _parse_note(os.pread(probe, RECORD_BYTES, 0))
        except OSError:
            return None
        finally:
            os.close(probe)


def _try_flock(descriptor: int, *, exclusive: bool = True) -> bool:
    """Lock without waiting; say whether that worked."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_like(database: str, path: str) -> int:
    """Open ``path`` for reading; create it with the mode and owner of the database file."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        pass
    try:
        # ``stat`` only: opening and closing the database would drop SQLite's own locks on it.
        model = os.stat(database)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, DEFAULT_MODE)
    mode = stat.S_IMODE(model.st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, mode)
    # Whoever may write the database must be able to lock, whatever the umask of the creator.
    with suppress(OSError):
        os.fchmod(descriptor, mode)
        os.fchown(descriptor, model.st_uid, model.st_gid)
    return descriptor


def _parse_note(raw: bytes) -> Holder | None:
    """Read the note back; None if it was never written or is damaged."""
    pid, _, rest = raw.decode(errors="replace").strip().partition(" ")
    since, _, thread = rest.partition(" ")
    try:
        return Holder(pid=int(pid), thread=thread or None, since=float(since))
    except ValueError:
        return None
