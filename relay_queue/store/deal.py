"""Deal: which of the jobs that queues have to give are taken, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Pick = tuple[Any, ...]
"""The row of a picked job: its id, whether it is a suspect, and unless careful its terms."""


@dataclass(slots=True)
class Hand:
    """What one queue has to give: its picks, and how many leases it allows."""

    picks: Iterator[Pick]
    room: int

    def next_pick(self, suspects_allowed: int) -> Pick | None:
        """Return the next job, or None when there is none to give."""
        if self.room < 1:
            return None
        for pick in self.picks:
            if not pick[1] or suspects_allowed > 0:
                self.room -= 1
                return pick
        return None


def deal(hands: list[Hand], limit: int, suspects: int) -> list[Pick]:
    """Deal places one at a time round the ring of queues; return the picks in that order."""
    dealt: list[Pick] = []
    while hands and len(dealt) < limit:
        for hand in list(hands):
            given = hand.next_pick(suspects)
            if given is None:
                hands.remove(hand)
                continue
            dealt.append(given)
            suspects -= given[1]
            if len(dealt) == limit:
                break
    return dealt
