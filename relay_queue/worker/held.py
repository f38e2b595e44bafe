"""The leases that a worker holds, on the monotonic clock: when to renew, when each ends.

The wall clock may jump; what a worker believes of its own leases must not jump with it. Times are
counted from before the transaction that granted them, so the worker's belief ends first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from relay_queue.store.records import Claim
from relay_queue.worker.context import JobContext

GRACE_SECONDS = 0.1
"""How long a function has to say itself that its time is over. Our word for it would make its own,
which comes a moment later, look like a late return."""


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


class Leases:
    """All leases of this process that have not been settled."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._held

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def grant(self, claim: Claim, context: JobContext, since: float) -> None:
        """Begin to hold a lease whose granting transaction was wanted at ``since``."""
        self._held[claim.lease_id] = Held(claim, context, since + claim.lease_seconds)

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
        return [
            held
            for held in self._held.values()
            if held.context.deadline is not None and held.context.deadline + GRACE_SECONDS <= now
        ]

    def gone(self, now: float) -> list[Held]:
        """Return the leases that ran out before we could renew them."""
        return [held for held in self._held.values() if held.until <= now]

    def next_event(self) -> float | None:
        """Return when the next renewal or time limit is, in monotonic seconds."""
        times = [held.renew_from for held in self._held.values()]
        deadlines = (held.context.deadline for held in self._held.values())
        times += [deadline + GRACE_SECONDS for deadline in deadlines if deadline is not None]
        return min(times, default=None)
