"""Minutes: what workers have counted, read back as totals, series and percentiles.

These rows are the only memory of what was done: nothing here reads jobs or leases, so that looking
back costs the same after a million jobs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from relay_queue.query import reads

TALLIES = """
    SELECT {key}, SUM(succeeded), SUM(failed), SUM(retried), SUM(died)
    FROM relay_queue_queueminute WHERE minute >= %s{only} GROUP BY {key} ORDER BY {key}
"""
"""Add up each ``minute``, in the order of the key's index, or each ``queue``, over all else."""

BY_SLOT = """
    SELECT slot.key, SUM(CAST(slot.value AS bigint))
    FROM relay_queue_queueminute, {counts} WHERE minute >= %s{only} GROUP BY slot.key
"""
"""Add up the histograms of all rows, bucket by bucket: 50 queues and 32 workers have 96,000 an hour."""

EVENTS = ("claimed", "succeeded", "failed", "retried", "died", "expired", "refused")

EVENTS_SINCE = f"""
    SELECT queue, {", ".join(f"SUM({event})" for event in EVENTS)}
    FROM relay_queue_queueminute WHERE minute >= %s GROUP BY queue
"""
"""Add up all that was counted for each queue since a time."""


@dataclass(slots=True)
class Tally:
    """What was done in some time.

    ``failed`` counts attempts whose function failed: they were ``retried`` or ``died``. A job also
    dies without an answer, when its last lease is lost or expires.
    """

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    died: int = 0

    def add(self, succeeded: int, failed: int, retried: int, died: int) -> None:
        """Add counts."""
        self.succeeded += int(succeeded)
        self.failed += int(failed)
        self.retried += int(retried)
        self.died += int(died)

    @property
    def ended(self) -> int:
        """Attempts that ended with an answer."""
        return self.succeeded + self.failed

    @property
    def failure_rate(self) -> float | None:
        """The part of the ended attempts that failed, 0 to 1; None if none ended."""
        return self.failed / self.ended if self.ended else None


@dataclass(slots=True)
class Histogram:
    """How many durations fell into each bucket of `relay_queue.store.bucket`."""

    counts: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many durations were counted."""
        return sum(self.counts.values())

    def percentile(self, share: float) -> float | None:
        """Estimate in seconds what ``share`` (0 to 1) of the durations stay within.

        A bucket reaches from half its limit to its limit; inside it the durations are taken to be
        spread evenly on a logarithmic scale. None if nothing was counted.
        """
        left = share * self.total
        for slot in sorted(self.counts):
            n = self.counts[slot]
            if n and left <= n:
                return float(upper_seconds(slot) * 0.5 ** (1 - left / n))
            left -= n
        return None


@dataclass(slots=True)
class Bucket:
    """One bar of a series: what was done from ``start`` on, until the next bar starts."""

    start: datetime
    tally: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class RecentStats:
    """The last minutes in detail: each minute, each queue, and all waits and runs."""

    spans: list[Bucket]
    queues: dict[str, Tally] = field(default_factory=dict)
    wait: Histogram = field(default_factory=Histogram)
    run: Histogram = field(default_factory=Histogram)


def upper_seconds(slot: int) -> float:
    """Return the limit of a histogram's bucket in seconds."""
    return float(2**slot) / 1_000_000 if slot else 0.0


def total(spans: Iterable[Bucket]) -> Tally:
    """Add up a series."""
    sum_of_all = Tally()
    for span in spans:
        tally = span.tally
        sum_of_all.add(tally.succeeded, tally.failed, tally.retried, tally.died)
    return sum_of_all


def series(now: datetime, width: timedelta, length: int) -> list[Bucket]:
    """Return what was done in the last ``length`` spans of ``width``, the present one last.

    ``width`` is in whole minutes and divides a day.
    """
    spans = empty_series(now, width, length)
    _fill(spans, _rows(TALLIES.format(key="minute", only=""), spans[0].start))
    return spans


def recent(now: datetime, minutes: int = 60, **of: Any) -> RecentStats:
    """Return the last minutes in detail, the present one included.

    ``queue=`` and ``worker_id=`` keep those of one queue or of one worker.
    """
    spans = empty_series(now, timedelta(minutes=1), minutes)
    only = "".join(f" AND {name} = %s" for name in of)
    since = (spans[0].start, *of.values())
    _fill(spans, _rows(TALLIES.format(key="minute", only=only), *since))
    found = RecentStats(spans)
    for queue, *counts in _rows(TALLIES.format(key="queue", only=only), *since):
        found.queues[queue] = Tally(*map(int, counts))
    for column, histogram in (("wait_histogram", found.wait), ("run_histogram", found.run)):
        table = reads.dialect().each_count.format(column=column)
        for slot, n in _rows(BY_SLOT.format(counts=table, only=only), *since):
            if n and str(slot).isdecimal():  # another key is of a row that was altered on disk
                histogram.counts[int(slot)] = int(n)
    return found


def events_since(moment: datetime) -> dict[str, dict[str, int]]:
    """Return what was counted since a whole minute, by queue and kind of event."""
    return {
        queue: dict(zip(EVENTS, map(int, counts), strict=True))
        for queue, *counts in _rows(EVENTS_SINCE, moment)
    }


def empty_series(now: datetime, width: timedelta, length: int) -> list[Bucket]:
    """Return the spans of a series with nothing in them."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    last = now - (now - midnight) % width
    return [Bucket(last - width * back) for back in reversed(range(length))]


def _fill(spans: list[Bucket], rows: Iterable[tuple[Any, ...]]) -> None:
    from_db = reads.dialect().from_db
    starts = [span.start for span in spans]
    for minute, *counts in rows:
        at = bisect_right(starts, from_db(minute)) - 1
        spans[at].tally.add(*counts)


def _rows(statement: str, since: datetime, *params: Any) -> list[tuple[Any, ...]]:
    return reads.rows(statement, reads.dialect().to_db(since), *params)
