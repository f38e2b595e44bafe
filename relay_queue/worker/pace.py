"""How much to claim, and from which queue first."""

from __future__ import annotations

import time
from collections.abc import Sequence

from relay_queue.store.records import Claim


class Pace:
    """Begin with one job, double while the queues fill the claim, fall back to one when they do not.

    A light load is then spread over the workers instead of being hoarded by the first to wake; a
    heavy one is taken in batches. ``more`` says that another claim may find something, and ``sure``
    that a ring is worth a claim without a read before it: the last claim after one was not in vain.
    Of many idle workers that are rung for one job, only who was the first last time tries at once.
    """

    def __init__(self) -> None:
        self.more = False
        self.sure = True
        self._trying = False
        self._size = 1
        self._last_queue: str | None = None
        self._rest_until = 0.0

    def ask(self, places: int) -> int:
        """Return how many jobs to claim when there is room for ``places``."""
        if not self.more or time.monotonic() < self._rest_until:
            return 0
        return min(places, self._size)

    def expect(self) -> None:
        """Claim because of a ring; what comes of it says whether the next ring is worth it, too."""
        self.more = self._trying = True

    def see_none(self) -> None:
        """Take in that a read has found no work."""
        self.more = False
        self._size = 1

    def rest(self, seconds: float) -> None:
        """Claim nothing for a while: the last claim searched long and found nothing."""
        self._rest_until = time.monotonic() + seconds

    def ring(self, queues: Sequence[str]) -> list[str]:
        """Return the queues beginning after the one that was dealt to last."""
        last = self._last_queue
        if last is None or last not in queues:
            return list(queues)
        start = list(queues).index(last) + 1
        return [*queues[start:], *queues[:start]]

    def learn(self, asked: int, claims: Sequence[Claim]) -> None:
        """Take in how many jobs a claim asked for and got."""
        if asked < 1:
            return
        if self._trying:
            self.sure, self._trying = bool(claims), False
        if claims:
            self._last_queue = claims[-1].queue
        self.more = len(claims) >= asked
        self._size = min(self._size * 2, 1 << 16) if self.more else 1
