"""What a worker has done, counted in memory and written by its own ticks.

Only what has been committed is counted. A worker that is killed loses at most its last second of
statistics; the ledger loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from relay_queue import store
from relay_queue.states import Outcome, State
from relay_queue.store.records import Claim, Recovered, Settled

KEPT = timedelta(minutes=2)
KEPT_UNWRITTEN = timedelta(hours=1)
FAILED = frozenset({State.RETRYING, State.DEAD})


class Stats:
    """Running totals of the process, and of each queue and minute."""

    def __init__(self) -> None:
        self.totals = store.Totals()
        self.minutes: dict[tuple[str, datetime], store.Totals] = {}
        self.dirty = False
        self._floored: tuple[datetime, datetime] | None = None

    def claimed(self, claims: Iterable[Claim], now: datetime) -> None:
        """Count claims and how long their jobs had waited."""
        for claim in claims:
            minute = self._minute(claim.queue, now)
            minute.claimed += 1
            self.totals.claimed += 1
            slot = store.bucket(claim.wait_seconds)
            minute.wait[slot] = minute.wait.get(slot, 0) + 1

    def settled(
        self, answers: Iterable[Settled], seconds: Mapping[int, float], now: datetime
    ) -> None:
        """Count how attempts ended, and how long they ran: ``seconds`` by lease id."""
        for answer in answers:
            minute = self._minute(answer.queue, now)
            if answer.reason:
                minute.refused += 1
                self.totals.refused += 1
                continue
            if answer.lease_id in seconds:
                slot = store.bucket(seconds[answer.lease_id])
                minute.run[slot] = minute.run.get(slot, 0) + 1
            if answer.state == State.SUCCEEDED:
                minute.succeeded += 1
                self.totals.succeeded += 1
            elif answer.state in FAILED:
                minute.failed += 1
                self.totals.failed += 1
                minute.retried += answer.state == State.RETRYING
                minute.died += answer.state == State.DEAD

    def recovered(self, leases: Iterable[Recovered], now: datetime) -> None:
        """Count leases that this worker ended for others."""
        for lease in leases:
            minute = self._minute(lease.queue, now)
            minute.expired += lease.outcome == Outcome.EXPIRED
            minute.died += lease.state == State.DEAD

    def written(self, now: datetime) -> None:
        """Forget the minutes that are long over and have been written.

        Minutes just over are kept: after a small step back of the clock they are written once more,
        and must have their old counts.
        """
        self._keep(_floor(now) - KEPT)
        self.dirty = False

    def unwritten(self, now: datetime) -> None:
        """Forget the minutes that could not be written for an hour: memory stays bounded."""
        self._keep(_floor(now) - KEPT_UNWRITTEN)

    def _keep(self, since: datetime) -> None:
        self.minutes = {key: t for key, t in self.minutes.items() if key[1] >= since}

    def _minute(self, queue: str, now: datetime) -> store.Totals:
        self.dirty = True
        if self._floored is None or self._floored[0] is not now:
            self._floored = (now, _floor(now))  # one tick has one time, floored once
        key = (queue, self._floored[1])
        found = self.minutes.get(key)
        return found or self.minutes.setdefault(key, store.Totals())


def _floor(now: datetime) -> datetime:
    return now.replace(second=0, microsecond=0)
