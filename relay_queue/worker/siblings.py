"""Other workers: who of them is proven dead, and the end of their leases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from relay_queue import store
from relay_queue.store.inspect import OtherWorker
from relay_queue.store.records import Recovered
from relay_queue.store.sessions import RESTART_GRACE_SECONDS, lock_key, take_locks
from relay_queue.wakeup.files import database_path
from relay_queue.worker.liveness import LockIdentity, dead_workers

BATCH = 1000
"""Leases of dead workers ended in one transaction."""

CONFIRM_SECONDS = 0.25
"""How long a session's lock must be seen free: a worker that lost its connection is back sooner."""

STOP_REASON = "died: its lock was free"


class Proof(Protocol):
    """What proves that a worker is dead."""

    def bury(self) -> None:
        """Remove what is left of the dead worker, after the commit of its recovery."""

    def close(self) -> None:
        """Let the proof go. May be called twice."""


@dataclass(frozen=True, slots=True)
class FreeSession:
    """A session's lock that was seen free. It counts once the recovering transaction takes it."""

    key: int

    def bury(self) -> None:
        """Leave nothing: the lock went with the session."""

    def close(self) -> None:
        """Hold nothing outside of a transaction."""


@dataclass(slots=True)
class DeadSiblings:
    """Workers proven dead, kept until their leases have been ended."""

    probes: dict[int, Proof] = field(default_factory=dict)
    left: bool = False
    suspects: dict[int, float] = field(default_factory=dict)
    """Since when the session lock of a worker has been seen free, in monotonic seconds."""

    _trust_from: float = 0.0

    def find(self, using: str, own_id: int) -> None:
        """Probe all workers that have not been seen to end. Reads only, and needs no gate."""
        others = [
            w for w in store.inspect.live_workers(but=own_id) if w.worker_id not in self.probes
        ]
        self._probe_files(using, [w for w in others if w.lock_device is not None])
        self._probe_sessions([w for w in others if w.session_lock])

    def doubt(self) -> None:
        """Judge no session for a while: we lost our own connection, and others may have, too."""
        self.suspects.clear()
        self._trust_from = time.monotonic() + RESTART_GRACE_SECONDS

    def recover(
        self, tx: store.Transaction, *, trial: store.Trial | None = None
    ) -> list[Recovered]:
        """End their leases, at most ``BATCH``; mark them as stopped once none is left."""
        dead = self._still_dead(tx)
        ended = store.recover_dead(tx, dead, BATCH, trial=trial)
        # In a trial jobs were condemned, too, or left as they are, and are not among those that ended.
        self.left = len(ended) >= BATCH if trial is None else bool(ended or trial.faults)
        if not self.left:
            store.stop_workers(tx, dead, STOP_REASON)
        return ended

    def bury(self) -> None:
        """Forget them, after the commit of a `recover` that has left no lease open."""
        if self.left:
            return
        for probe in self.probes.values():
            with suppress(OSError):  # a file that may not be removed is found dead once more
                probe.bury()
        self.close()

    def close(self) -> None:
        """Let their locks go, so that somebody else may recover what we have not."""
        for probe in self.probes.values():
            probe.close()
        self.probes.clear()

    def _probe_files(self, using: str, others: Sequence[OtherWorker]) -> None:
        path = database_path(using)
        if path is None:
            return
        candidates = [
            (w.worker_id, w.incarnation, LockIdentity(w.lock_device, w.lock_inode))
            for w in others
            if w.lock_device is not None and w.lock_inode is not None
        ]
        self.probes.update(dead_workers(path, candidates))

    def _probe_sessions(self, others: Sequence[OtherWorker]) -> None:
        now = time.monotonic()
        if now < self._trust_from:
            return
        keys = {w.worker_id: key for w in others if (key := lock_key(w.incarnation)) is not None}
        free = store.inspect.unlocked(list(keys.values()))
        self.suspects = {w: self.suspects.get(w, now) for w, key in keys.items() if key in free}
        for worker_id, since in list(self.suspects.items()):
            if now - since >= CONFIRM_SECONDS:
                self.probes[worker_id] = FreeSession(keys[worker_id])
                del self.suspects[worker_id]

    def _still_dead(self, tx: store.Transaction) -> list[int]:
        """Return who is dead in this transaction: sessions are judged under their locks."""
        keys = {w: proof.key for w, proof in self.probes.items() if isinstance(proof, FreeSession)}
        taken = take_locks(tx, list(keys.values()))
        return [w for w in self.probes if w not in keys or keys[w] in taken]
