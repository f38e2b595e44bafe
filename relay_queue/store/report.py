"""Report: the read side for people. How the queues stand, and the story of a job.

Queues and workers are read from the counters and by short probes of indexes, so that looking costs
the same at a million jobs. Verdicts cost what the
leases cost that were not acked. Only `ledger_totals` reads a whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from relay_queue import conf
from relay_queue.exceptions import JobNotFound
from relay_queue.models import Job, Lease, Queue, Worker
from relay_queue.states import ANSWERED, UNFINISHED, State
from relay_queue.store import inspect, reads, verdicts
from relay_queue.verdict import Verdict, has_answered, judge

COUNTS = """
    SELECT queue, state, SUM(n) FROM relay_queue_queuecount
    GROUP BY queue, state HAVING SUM(n) <> 0 ORDER BY queue
"""
"""Read how many jobs each queue has in each state."""

OLDEST_READY = """
    SELECT q.name, (
        SELECT min(n.available_at) FROM (
            SELECT j.available_at FROM relay_queue_job j
            WHERE j.queue = q.name AND j.state = 'ready' ORDER BY j.rank, j.id LIMIT %s) AS n)
    FROM (SELECT DISTINCT queue AS name FROM relay_queue_queuecount
          WHERE state = 'ready' AND n > 0) AS q
"""
"""Find since when, in each queue, the oldest of the jobs next in line has been ready."""

OPEN_PER_WORKER = """
    SELECT worker_id, count(*) FROM relay_queue_lease
    WHERE ended_at IS NULL AND worker_id IS NOT NULL GROUP BY worker_id
"""
"""Count the leases that each worker holds."""

REFUSED_SINCE = "SELECT count(*) FROM relay_queue_lease WHERE refused_at >= %s"
"""Count the late returns since a time."""

LEDGER_TOTALS = """
    SELECT COALESCE(outcome, ''), count(*), count(refused_at) FROM relay_queue_lease
    GROUP BY COALESCE(outcome, '')
"""
"""Count all leases by outcome, and those whose owner came back late."""

LOOKED_AT_FOR_OLDEST: Final = 1_000
RECENTLY_STOPPED: Final = timedelta(days=1)
MOST_STOPPED_WORKERS: Final = 10


@dataclass(slots=True)
class QueueStatus:
    """One queue: its limits, its jobs by state, and for how long its oldest ready job has waited.

    ``oldest_wait_seconds`` is exact up to ``LOOKED_AT_FOR_OLDEST`` ready jobs; in a deeper queue it
    is the longest wait among those next in line.
    """

    name: str
    capacity: int | None = None
    max_running: int | None = None
    aging_seconds: float | None = None
    paused_at: datetime | None = None
    counts: dict[str, int] = field(default_factory=dict)
    oldest_wait_seconds: float | None = None

    @property
    def unfinished(self) -> int:
        """Jobs that count against the capacity."""
        return sum(self.counts.get(state, 0) for state in UNFINISHED)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker: its row, the leases it holds, and the age of its last heartbeat."""

    row: Worker
    open_leases: int
    heartbeat_age_seconds: float


@dataclass(frozen=True, slots=True)
class Status:
    """How everything stands at ``now``."""

    now: datetime
    queues: list[QueueStatus]
    workers: list[WorkerStatus]
    next_due_at: datetime | None
    refused_last_day: int
    verdicts: dict[Verdict, int]

    @property
    def dead(self) -> int:
        """Dead letters that wait for an operator."""
        return sum(queue.counts.get(State.DEAD, 0) for queue in self.queues)


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """All leases by outcome; open ones under ``open``. ``refused`` had an owner return late."""

    outcomes: dict[str, int]
    refused: int


@dataclass(frozen=True, slots=True)
class Story:
    """What the ledger tells about one job. ``verdict`` sums it up, ``detail`` says why."""

    job: Job
    leases: list[Lease]
    verdict: Verdict
    detail: str


def status() -> Status:
    """Return how queues and workers stand now."""
    now = inspect.now()
    return Status(
        now=now,
        queues=queues(now),
        workers=workers(now),
        next_due_at=inspect.look().next_due_at,
        refused_last_day=refused_since(now - timedelta(days=1)),
        verdicts=verdicts.count(),
    )


def queues(now: datetime) -> list[QueueStatus]:
    """Return every queue that has a row or has jobs, by name."""
    fields = ("capacity", "max_running", "aging_seconds", "paused_at")
    found = {
        row.name: QueueStatus(row.name, *(getattr(row, name) for name in fields))
        for row in Queue.objects.using(_alias())
    }
    for queue, state, n in reads.rows(COUNTS):
        found.setdefault(queue, QueueStatus(queue)).counts[state] = int(n)
    for name, since in reads.rows(OLDEST_READY, LOOKED_AT_FOR_OLDEST):
        if since is not None and name in found:
            found[name].oldest_wait_seconds = waited_seconds(since, now)
    return [found[name] for name in sorted(found)]


def workers(now: datetime) -> list[WorkerStatus]:
    """Return the workers that have not stopped, then a few that did within a day."""
    rows = Worker.objects.using(_alias())
    live = rows.filter(stopped_at__isnull=True).order_by("name", "id")
    stopped = rows.filter(stopped_at__gte=now - RECENTLY_STOPPED).order_by("-stopped_at", "-id")
    held = dict(reads.rows(OPEN_PER_WORKER))
    return [
        WorkerStatus(row, held.get(row.id, 0), _age(row.heartbeat_at, now))
        for row in [*live, *stopped[:MOST_STOPPED_WORKERS]]
    ]


def _age(moment: datetime | None, now: datetime) -> float:
    """Return the seconds since a heartbeat; one that an altered row has no time of is long ago."""
    return (now - moment).total_seconds() if isinstance(moment, datetime) else now.timestamp()


def refused_since(moment: datetime) -> int:
    """Return how many owners came back late since a time and were refused."""
    ((n,),) = reads.rows(REFUSED_SINCE, reads.dialect().to_db(moment))
    return int(n)


def ledger_totals() -> LedgerTotals:
    """Count the whole ledger. Reads every lease: about a second for a million."""
    rows = reads.rows(LEDGER_TOTALS)
    return LedgerTotals(
        outcomes={outcome or "open": n for outcome, n, _ in sorted(rows)},
        refused=sum(refused for _, _, refused in rows),
    )


def story(job_id: int) -> Story:
    """Return the story of a job. Raises `JobNotFound`."""
    job = Job.objects.using(_alias()).filter(pk=job_id).first()
    if job is None:
        raise JobNotFound(job_id)
    leases = list(
        Lease.objects.using(_alias()).filter(job=job_id).select_related("worker").order_by("id")
    )
    return Story(job, leases, judge(leases), told(leases))


def told(leases: Sequence[Lease]) -> str:
    """Say what the verdict on a job rests on, given its leases."""
    answered = [_named(lease) for lease in leases if lease.outcome and has_answered(lease)]
    cut_short = [_named(lease) for lease in leases if lease.outcome and not has_answered(lease)]
    under_way = [str(lease.attempt) for lease in leases if lease.outcome is None]
    lines = [f"attempts that answered: {', '.join(answered)}"] if answered else []
    lines += [f"attempts cut short: {', '.join(cut_short)}"] if cut_short else []
    lines += [f"attempt {number} is under way" for number in under_way]
    return "; ".join(lines) or "it was never leased"


def _named(lease: Lease) -> str:
    """Name an attempt; by its end if that is not an answer, and by the late word if that is."""
    if lease.outcome in ANSWERED:
        return str(lease.attempt)
    late = f", late {lease.refused_verb}" if has_answered(lease) else ""
    return f"{lease.attempt} ({lease.outcome}{late})"


def waited_seconds(since: Any, now: datetime) -> float:
    """Return how long a job has been ready since a time as the database tells it, in seconds."""
    return max((now - reads.dialect().from_db(since)).total_seconds(), 0.0)


def _alias() -> str:
    return conf.get().database
