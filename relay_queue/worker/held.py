"""The leases that a worker holds, on the monotonic clock: when to renew, when each ends.

The wall clock may jump; what a worker believes of its own leases must not jump with it. Times are
counted from before the transaction that granted them, so the worker's belief ends first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from time import monotonic

from relay_queue.context import JobContext
from relay_queue.store.records import Claim


@dataclass(slots=True)
class Held:
    """One lease in our hands; ``until`` is monotonic seconds."""

    claim: Claim
    context: JobContext
    until: float

    @property
    def renew_from(self) -> float:
        """When half of its length is over."""
        return self.until - self.claim.lease_seconds / 2

    @property
    def overdue_from(self) -> float:
        """When its function has run past its time limit and has had time to say so."""
        return self.context.overdue_from

    @property
    def next_event(self) -> float:
        """When it must be renewed or its function be stopped, whichever is first, or earlier."""
        timeout_seconds = self.claim.timeout_seconds
        if self.context.waits and timeout_seconds is not None:
            # Its clock may start at any moment from now on.
            return min(self.renew_from, monotonic() + timeout_seconds)
        return min(self.renew_from, self.overdue_from)


class Leases:
    """All leases of this process that have not been settled."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        # No lease needs anything before this time. It may be too early, never too late, and spares
        # a look at every lease at every turn of the loop.
        self._quiet_until = inf

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._held

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def grant(self, claim: Claim, context: JobContext, since: float) -> None:
        """Begin to hold a lease whose granting transaction was wanted at ``since``."""
        held = Held(claim, context, since + claim.lease_seconds)
        self._held[claim.lease_id] = held
        self._quiet_until = min(self._quiet_until, held.next_event)

    def drop(self, lease_id: int) -> Held | None:
        """Stop holding a lease: it was settled, or lost."""
        return self._held.pop(lease_id, None)

    def ids(self) -> set[int]:
        """Return the ids of all leases held."""
        return set(self._held)

    def suspects(self) -> int:
        """Count the jobs among them that cost two owners in a row."""
        return sum(held.claim.suspect for held in self._held.values())

    def to_renew(self, now: float) -> list[Held]:
        """Return the leases past half of their life; their neighbours come along in one write."""
        if now < self._quiet_until:
            return []
        if not any(held.renew_from <= now for held in self._held.values()):
            return []
        return [h for h in self._held.values() if h.renew_from - h.claim.lease_seconds / 8 <= now]

    def renewed(self, lease_ids: Iterable[int], since: float) -> None:
        """Note that leases were extended by a transaction that was wanted at ``since``."""
        for lease_id in lease_ids:
            held = self._held[lease_id]
            held.until = since + held.claim.lease_seconds

    def overdue(self, now: float) -> list[Held]:
        """Return the leases whose function has run past its time limit and does not say so."""
        if now < self._quiet_until:
            return []
        return [held for held in self._held.values() if held.overdue_from <= now]

    def gone(self, now: float) -> list[Held]:
        """Return the leases that ran out before we could renew them."""
        if now < self._quiet_until:
            return []
        return [held for held in self._held.values() if held.until <= now]

    def next_event(self, now: float) -> float | None:
        """Return when the next renewal or time limit is, or may be, in monotonic seconds."""
        if now >= self._quiet_until:
            self._quiet_until = min((held.next_event for held in self._held.values()), default=inf)
        return None if self._quiet_until == inf else self._quiet_until
