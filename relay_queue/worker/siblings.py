"""Other workers of this host: who of them is proven dead, and the end of their leases."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from relay_queue import store
from relay_queue.store.records import Recovered
from relay_queue.worker.liveness import LockIdentity, Probe, dead_workers

BATCH = 1000
"""Leases of dead workers ended in one transaction."""

STOP_REASON = "died: its lock was free"


@dataclass(slots=True)
class DeadSiblings:
    """Workers proven dead, whose locks we hold until their leases have been ended."""

    probes: dict[int, Probe] = field(default_factory=dict)
    left: bool = False

    def find(self, database_path: str | None, own_id: int) -> None:
        """Probe all workers that have not been seen to end. Reads only, and needs no gate."""
        if database_path is None:
            return
        candidates = [
            (other.worker_id, other.incarnation, LockIdentity(other.lock_device, other.lock_inode))
            for other in store.inspect.live_workers(but=own_id)
            if other.lock_device is not None
            and other.lock_inode is not None
            and other.worker_id not in self.probes
        ]
        self.probes.update(dead_workers(database_path, candidates))

    def recover(self, tx: store.Transaction, *, careful: bool = False) -> list[Recovered]:
        """End their leases, at most ``BATCH``; mark them as stopped once none is left."""
        dead = list(self.probes)
        ended = store.recover_dead(tx, dead, BATCH, careful=careful)
        # In a careful tick jobs were condemned, too, and are not among those that ended.
        self.left = bool(ended) if careful else len(ended) >= BATCH
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
