"""The order of jobs inside a queue, as one integer that is stored and indexed.

A smaller rank runs first. A job gains one priority class on every newcomer for each
``aging_seconds`` that it has waited. All jobs of a queue gain at the same pace, so their order
among each other never changes, and the rank needs no rewriting while they wait.
"""

from __future__ import annotations

from datetime import datetime
from enum import IntEnum
from typing import Final

from relay_queue.clock import to_microseconds

MIN_PRIORITY: Final = -100
MAX_PRIORITY: Final = 100

# Strict priority keeps the classes apart by a step that no difference of dates can bridge.
#
#   step       2**56 µs = 72,057,594,037,927,936 µs, about 2,283 years
#   dates      cut to [0, step), which is 1970 to 4253: two jobs differ by less than one step
#   smallest   0    − 100 × step               = −7.206e18
#   largest    step + 100 × step = 101 × 2**56 =  7.278e18, below 2**63 = 9.223e18
#
# With aging, dates reach at most the year 9999 (2.534e17 µs), and 100 classes of at most ten years
# (100 × 3.154e14 µs = 3.154e16 µs) add far too little to leave int64.
_STRICT_STEP: Final = 2**56
MAX_AGING_SECONDS: Final = 315_360_000.0
# Below a millisecond a class means nothing.
MIN_AGING_SECONDS: Final = 0.001


class Priority(IntEnum):
    """The four everyday classes. Any integer from ``MIN_PRIORITY`` to ``MAX_PRIORITY`` will do."""

    LOW = -1
    NORMAL = 0
    HIGH = 1
    URGENT = 2


def rank(available_at: datetime, priority: int, aging_seconds: float | None) -> int:
    """Return the sort key of a job; it fits a signed 64-bit integer.

    ``available_at`` is aware. ``aging_seconds`` is the waiting time worth one priority class, from
    ``MIN_AGING_SECONDS`` to ``MAX_AGING_SECONDS``; None is strict priority, where a job of a lower
    class never goes before one of a higher class however long it has waited.
    """
    moment = to_microseconds(available_at)
    if aging_seconds is None:
        return min(max(moment, 0), _STRICT_STEP - 1) - priority * _STRICT_STEP
    return moment - priority * round(aging_seconds * 1_000_000)


def effective_priority(
    priority: int, available_at: datetime, aging_seconds: float | None, now: datetime
) -> float:
    """Return the priority with the classes gained by waiting until ``now``, for display."""
    if aging_seconds is None:
        return float(priority)
    waited_seconds = max((now - available_at).total_seconds(), 0.0)
    return priority + waited_seconds / aging_seconds
