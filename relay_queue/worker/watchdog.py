"""The end of processes whose functions do not end, or that keep the whole project from writing.

A worker watches its own slots and its own use of the writer gate. Its supervisor watches the gate
from outside, for a worker that could not even end itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from django.db import connections

from relay_queue import conf
from relay_queue.db.gate import gate_of
from relay_queue.logs import get_logger
from relay_queue.worker.lifetime import leave

if TYPE_CHECKING:
    from relay_queue.db.gate import Gate, Holder

logger = get_logger("relay_queue.worker")

EXIT_STUCK = 71
"""Exit code when every slot is held by a function that does not end."""

EXIT_HOGGED = 72
"""Exit code of a process whose function held the writer for too long."""

HOGGED_SECONDS = 1.0
"""How long the end of such a process may take: until then no process can write."""

STUCK_GRACE_SECONDS = 5.0
"""How long all slots must be stuck before the process is given up."""


SHOWN_IDS = 20
"""The most jobs that a line of the log names."""


def shown_ids(job_ids: Collection[int]) -> str:
    """Return the ids of jobs for a line of the log, and how many more there are."""
    shown = ", ".join(map(str, sorted(job_ids)[:SHOWN_IDS]))
    more = len(job_ids) - SHOWN_IDS
    return shown if more <= 0 else f"{shown} and {more} more"


class StuckWatch:
    """Watches for a process that has no usable slot any more.

    Not at once: a function whose lease has ended gets time to notice it. The caller has taken what
    has finished: a slot whose function has returned is not stuck.
    """

    def __init__(self) -> None:
        self.given_up_at: float | None = None

    def given_up(self, stuck: int, places: int) -> bool:
        """Say whether all places have been stuck for the whole grace: now ``stuck`` are."""
        if not stuck or stuck < places:
            self.given_up_at = None
            return False
        now = time.monotonic()
        self.given_up_at = self.given_up_at or now + STUCK_GRACE_SECONDS
        if now < self.given_up_at:
            return False
        logger.error(
            "Every slot is held by a function that does not end: %d leases are over for %g s and more. "
            "Exiting; other workers have their jobs.",
            stuck,
            STUCK_GRACE_SECONDS,
        )
        return True


def exit_if_gate_is_hogged(stuck_threads: Collection[int], in_hand: Collection[int]) -> None:
    """End this process if one of its slots has held the gate for longer than is allowed.

    For a thread among ``stuck_threads``, whose function is past its time limit, the limit of an
    atomic function applies. A normal exit would wait for the stuck thread, so the process ends
    where it stands. The kernel drops gate and liveness lock, and the next worker recovers its jobs.
    The jobs ``in_hand`` run again, too: the thread that holds the writer keeps it from writing
    their outcomes.
    """
    settings = conf.get()
    gate = gate_of(connections[settings.database])
    held = None if gate is None else gate.held_seconds()
    if held is None:
        return
    stuck = held[0] in stuck_threads
    limit = settings.atomic_max_seconds if stuck else settings.gate_hold_seconds
    if held[1] > limit:
        logger.critical(
            "Thread %s has held the writer for %.1f s, more than the %g s allowed. "
            "This process ends; another worker takes its jobs.",
            held[0],
            held[1],
            limit,
        )
        if in_hand:
            logger.critical(
                "The outcomes of %d jobs could not be written meanwhile, and they run again: %s.",
                len(in_hand),
                shown_ids(in_hand),
            )
        leave(EXIT_HOGGED, seconds=HOGGED_SECONDS)


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
