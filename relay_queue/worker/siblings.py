"""Other workers: who of them is proven dead, and the end of their leases."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from relay_queue import store
from relay_queue.query import looks
from relay_queue.query.looks import OtherWorker
from relay_queue.store.records import Recovered
from relay_queue.store.workers import RESTART_GRACE_SECONDS, lock_key, take_locks
from relay_queue.wakeup.files import database_path
from relay_queue.worker.liveness import Liveness, LockIdentity, probe

BATCH = 1000
"""Leases of dead workers ended in one transaction."""

CONFIRM_SECONDS = 0.25
"""How long a session's lock must be seen free: a worker that lost its connection is back sooner."""

STOP_REASON = "died: its lock was free"


WATCHED = 3
"""How many living workers each worker watches: those behind it in the ring of all ids, and whoever is
dead between them. So each death is seen by three, of whom some may be stopped, and the work of all
grows with their number and not with its square."""


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

    def find(self, using: str, own_id: int, *, watched: float = WATCHED) -> None:
        """Probe the workers behind our own in the ring, until ``watched`` of them live.

        Of each run of dead workers the three living ones before it see all. Who can be neither
        proven dead nor seen to live, as in another container, is passed by: it could not prove the
        death of those behind it either. Reads only, and needs no gate.
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
        for proof in self.probes.values():
            with suppress(OSError):  # a file that may not be removed is found dead once more
                proof.bury()
        self.close()

    def close(self) -> None:
        """Let their locks go, so that somebody else may recover what we have not."""
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
            return True  # nobody is judged for a while
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
        """Return who is dead in this transaction: sessions are judged under their locks."""
        keys = {w: proof.key for w, proof in self.probes.items() if isinstance(proof, FreeSession)}
        taken = take_locks(tx, list(keys.values()))
        return [w for w in self.probes if w not in keys or keys[w] in taken]
