"""Seen from outside: a worker process that holds the writer gate and does not let go."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay_queue.db.gate import Gate, Holder

# A worker ends itself at the limit. The supervisor acts when the worker could not even do that.
GRACE_SECONDS = 5.0


class GateWatch:
    """Says which process has held one gate for too long.

    Time is measured here, on the monotonic clock, from the first look that saw this very stay
    behind the gate: the note of the holder carries the system clock, which may jump.
    """

    def __init__(self, gate: Gate, hold_seconds: float) -> None:
        """Watch ``gate``, where a stay longer than ``hold_seconds`` and a grace is too long."""
        self._gate = gate
        self._limit_seconds = hold_seconds + GRACE_SECONDS
        self._seen: Holder | None = None
        self._seen_since = 0.0

    def overdue(self) -> Holder | None:
        """Look at the gate; return its holder if that has been the same for too long."""
        holder = self._gate.holder()
        now = time.monotonic()
        if holder != self._seen:
            self._seen, self._seen_since = holder, now
        if holder is None or now - self._seen_since <= self._limit_seconds:
            return None
        return holder if _may_hold(holder.pid, self._gate.path) else None


def _may_hold(pid: int, path: str) -> bool:
    """Say whether process ``pid`` can be the one that holds the lock on ``path``.

    The note may come from another container that shares the file, where the same number is
    another process. Where the system lists the locks of each descriptor, look; elsewhere trust
    the note.
    """
    if not Path("/proc/self/fdinfo").exists():
        return True
    try:
        inode = os.stat(path).st_ino
        entries = list(Path(f"/proc/{pid}/fdinfo").iterdir())
    except OSError:
        return False
    return any(_is_lock_on(inode, line) for entry in entries for line in _lines(entry))


def _lines(entry: Path) -> list[str]:
    try:
        return entry.read_text().splitlines()
    except OSError:  # closed since it was listed, so it is not the one that is held for so long
        return []


def _is_lock_on(inode: int, line: str) -> bool:
    return line.startswith("lock:") and " FLOCK " in line and f":{inode} " in line
