"""What a worker has done, counted in memory and written by its own ticks.

Only what has been committed is counted. A worker that is killed loses at most its last second of
statistics; the ledger loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from relay_queue import store
from relay_queue.states import Outcome, State
from relay_queue.store.records import Claim, Recovered, Settled


class Stats:
    """Running totals of the process, and of each queue and minute."""

    def __init__(self) -> None:
        self.totals = store.Totals()
        self.minutes: dict[tuple[str, datetime], store.Totals] = {}
        self.dirty = False

    def claimed(self, claims: Iterable[Claim], now: datetime) -> None:
        """Count claims and how long their jobs had waited."""
        for claim in claims:
            minute = self._minute(claim.queue, now)
            minute.claimed += 1
            self.totals.claimed += 1
            slot = store.bucket(claim.wait_seconds)
            minute.wait[slot] = minute.wait.get(slot, 0) + 1

    def settled(self, answer: Settled, run_seconds: float | None, now: datetime) -> None:
        """Count how one attempt ended, and how long it ran."""
        minute = self._minute(answer.queue, now)
        if not answer.accepted:
            minute.refused += 1
            self.totals.refused += 1
            return
        if run_seconds is not None:
            slot = store.bucket(run_seconds)
            minute.run[slot] = minute.run.get(slot, 0) + 1
        if answer.state == State.SUCCEEDED:
            minute.succeeded += 1
            self.totals.succeeded += 1
        elif answer.state == State.RETRYING:
            minute.failed += 1
            minute.retried += 1
            self.totals.failed += 1
        elif answer.state == State.DEAD:
            minute.failed += 1
            minute.died += 1
            self.totals.failed += 1

    def recovered(self, leases: Iterable[Recovered], now: datetime) -> None:
        """Count leases that this worker ended for others."""
        for lease in leases:
            minute = self._minute(lease.queue, now)
            minute.expired += lease.outcome == Outcome.EXPIRED
            minute.died += lease.state == State.DEAD

    def written(self, now: datetime) -> None:
        """Forget the minutes that are over and have been written."""
        current = _floor(now)
        self.minutes = {key: t for key, t in self.minutes.items() if key[1] >= current}
        self.dirty = False

    def _minute(self, queue: str, now: datetime) -> store.Totals:
        self.dirty = True
        key = (queue, _floor(now))
        try:
            return self.minutes[key]
        except KeyError:
            return self.minutes.setdefault(key, store.Totals())


def _floor(now: datetime) -> datetime:
    return now.replace(second=0, microsecond=0)
