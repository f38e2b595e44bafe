"""Overview: everything that a dashboard shows, in a fixed number of short reads.

Counters and probes of indexes only. The reads are not one snapshot: that would need a transaction,
and a page that is looked at must never take the write lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from relay_queue.states import INTERRUPTED
from relay_queue.store import inspect, minutes, reads, report

NEXT_DUE = """
    SELECT state, min(available_at) FROM (
        SELECT state, available_at FROM relay_queue_job WHERE state IN ('scheduled', 'retrying')
        ORDER BY available_at LIMIT %s) AS waiting
    GROUP BY state
"""
"""Find when the next scheduled and the next retrying job are due, among those that are due first."""

_INTERRUPTED_SQL = ", ".join(f"'{outcome}'" for outcome in INTERRUPTED)

INTERRUPTED_SINCE = f"""
    SELECT count(DISTINCT job_id) FROM (
        SELECT job_id FROM relay_queue_lease
        WHERE outcome IN ({_INTERRUPTED_SQL}) AND ended_at >= %s LIMIT %s) AS cut_short
"""
"""Count the jobs that were taken from an owner since a time, by the index of such leases."""

LOOKED_AT_FOR_DUE: Final = 1_000
MOST_INTERRUPTED: Final = 10_000
"""Where counting ends. So many interruptions in a day are one finding, not ten thousand."""

DAY: Final = timedelta(days=1)
SPAN: Final = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Overview:
    """How everything stands at ``now``, and what was done in the last hour and day.

    ``next_due`` has a time by state, as far as it is among the ``LOOKED_AT_FOR_DUE`` jobs that are
    due first. ``interrupted_last_day`` counts jobs, up to ``MOST_INTERRUPTED``.
    """

    now: datetime
    queues: list[report.QueueStatus]
    workers: list[report.WorkerStatus]
    hour: minutes.Recent
    day: list[minutes.Span]
    next_due: dict[str, datetime]
    refused_last_day: int
    interrupted_last_day: int

    def jobs(self, state: str) -> int:
        """Return how many jobs all queues have in a state."""
        return sum(queue.counts.get(state, 0) for queue in self.queues)


def read() -> Overview:
    """Read how everything stands now."""
    now = inspect.now()
    return Overview(
        now=now,
        queues=report.queues(now),
        workers=report.workers(now),
        hour=minutes.recent(now),
        day=minutes.series(now, SPAN, int(DAY / SPAN)),
        next_due=_next_due(),
        refused_last_day=report.refused_since(now - DAY),
        interrupted_last_day=_interrupted_since(now - DAY),
    )


def _next_due() -> dict[str, datetime]:
    from_db = reads.dialect().from_db
    return {state: from_db(moment) for state, moment in reads.rows(NEXT_DUE, LOOKED_AT_FOR_DUE)}


def _interrupted_since(moment: datetime) -> int:
    ((jobs,),) = reads.rows(INTERRUPTED_SINCE, reads.dialect().to_db(moment), MOST_INTERRUPTED)
    return int(jobs)
