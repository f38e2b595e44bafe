"""Status: how queues and workers stand, in short reads that cost the same at any size.

They read the counters and probe indexes. Several of them are not one snapshot: that would need a
transaction, and a page that is looked at must never take the write lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock
from typing import Final

from relay_queue import conf
from relay_queue.models import Queue, Worker
from relay_queue.query import history, ledger, looks, reads
from relay_queue.states import INTERRUPTED, NOT_DUE, UNFINISHED, State, sql_list
from relay_queue.verdict import Verdict

COUNTS = """
    SELECT queue, state, SUM(n) FROM relay_queue_queuecount{where}
    GROUP BY queue, state HAVING SUM(n) <> 0 ORDER BY queue
"""
"""Read how many jobs each queue has in each state."""

OLDEST_READY = """
    SELECT q.name, (
        SELECT min(n.available_at) FROM (
            SELECT j.available_at FROM relay_queue_job j
            WHERE j.queue = q.name AND j.state = 'ready' ORDER BY j.rank, j.id LIMIT %s) AS n)
    FROM (SELECT DISTINCT queue AS name FROM relay_queue_queuecount
          WHERE state = 'ready' AND n > 0{only}) AS q
"""
"""Find since when, in each queue, the oldest of the jobs next in line has been ready."""

OPEN_PER_WORKER = """
    SELECT worker_id, count(*) FROM relay_queue_lease
    WHERE ended_at IS NULL AND worker_id IS NOT NULL GROUP BY worker_id
"""
"""Count the leases that each worker holds."""

REFUSED_SINCE = "SELECT count(*) FROM relay_queue_lease WHERE refused_at >= %s"
"""Count the late returns since a time."""

LOOKED_AT_FOR_OLDEST: Final = 1_000

SILENT_SECONDS: Final = 60.0
"""Without a heartbeat for so long, in which six are due, a live worker is silent."""

MOST_STOPPED_WORKERS: Final = 10

NEXT_DUE = f"""
    SELECT state, min(available_at) FROM (
        SELECT state, available_at FROM relay_queue_job WHERE state IN ({sql_list(NOT_DUE)})
        ORDER BY available_at LIMIT %s) AS waiting
    GROUP BY state
"""
"""Find when the next scheduled and the next retrying job are due, among those that are due first."""

INTERRUPTED_SINCE = f"""
    SELECT count(DISTINCT job_id) FROM (
        SELECT job_id FROM relay_queue_lease
        WHERE outcome IN ({sql_list(INTERRUPTED)}) AND ended_at >= %s LIMIT %s) AS cut_short
"""
"""Count the jobs that were taken from an owner since a time, by the index of such leases."""

LOOKED_AT_FOR_DUE: Final = 1_000

MOST_INTERRUPTED: Final = 10_000
"""Where counting ends. So many interruptions in a day are one finding, not ten thousand."""

DAY: Final = timedelta(days=1)

SPAN: Final = timedelta(minutes=30)

NEXT_OF = """
    SELECT id FROM relay_queue_job
    WHERE queue = %s AND state = 'ready' ORDER BY rank, id LIMIT %s
"""
"""Find the jobs that will be claimed next, by the index of ready jobs."""

_IS_LATER = """
    (SELECT l.acquired_at FROM relay_queue_lease l
     WHERE l.id >= (low + high) / 2 ORDER BY l.id LIMIT 1) > %s
"""

LAST_GRANTED_BY = f"""
    WITH RECURSIVE half (low, high) AS (
        SELECT CAST(0 AS bigint), COALESCE(MAX(id), 0) + 1 FROM relay_queue_lease
        UNION ALL
        SELECT CASE WHEN {_IS_LATER} THEN low ELSE (low + high) / 2 END,
               CASE WHEN {_IS_LATER} THEN (low + high) / 2 ELSE high END
        FROM half WHERE high - low > 1
    )
    SELECT MIN(high) FROM half
"""
"""Find about where in the ledger a time is, by halving: ids grow with the time of the grant."""

ENDED_OF = """
    SELECT near.id FROM (
        SELECT id, worker_id, ended_at FROM relay_queue_lease
        WHERE id <= %s ORDER BY id DESC LIMIT %s) AS near
    WHERE near.worker_id = %s AND near.ended_at IS NOT NULL LIMIT %s
"""
"""Find the last ended leases of a worker among so many leases before one: no index has the worker,
which would cost every lease two writes more. The order of the inner rows is kept: only so can the walk
stop at the last one wanted."""

LOOKED_AT_FOR_WORKER: Final = 5_000

AFTER_HEARTBEAT: Final = timedelta(minutes=1)
"""Nothing is granted to a worker so long after its last heartbeat."""


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
class Overview:
    """How everything stands at ``now``, and what was done in the last hour and day.

    ``next_due`` has a time by state, as far as it is among the ``LOOKED_AT_FOR_DUE`` jobs that are
    due first. ``interrupted_last_day`` counts jobs, up to ``MOST_INTERRUPTED``.
    """

    now: datetime
    queues: list[QueueStatus]
    workers: list[WorkerStatus]
    hour: history.RecentStats
    day: list[history.Bucket]
    next_due: dict[str, datetime]
    refused_last_day: int
    interrupted_last_day: int

    def jobs(self, state: str) -> int:
        """Return how many jobs all queues have in a state."""
        return sum(queue.counts.get(state, 0) for queue in self.queues)


def read_status() -> Status:
    """Return how queues and workers stand now."""
    now = looks.now()
    return Status(
        now=now,
        queues=queues(now),
        workers=workers(now),
        next_due_at=looks.read_queues().next_due_at,
        refused_last_day=_count_since(REFUSED_SINCE, now - DAY),
        verdicts=ledger.count_verdicts(),
    )


def queues(now: datetime) -> list[QueueStatus]:
    """Return every queue that has a row or has jobs, by name."""
    return _stand(Queue.objects.using(_alias()), now)


def queue_status(queue: Queue, now: datetime) -> QueueStatus:
    """Return how one queue stands; see `queues`."""
    (found,) = _stand([queue], now, " WHERE queue = %s", " AND queue = %s", queue.pk)
    return found


def _stand(
    rows: Iterable[Queue], now: datetime, where: str = "", only: str = "", *of: str
) -> list[QueueStatus]:
    """Return how these queues stand, and others that have jobs as far as the conditions admit."""
    limits = ("capacity", "max_running", "aging_seconds", "paused_at")
    found = {
        row.name: QueueStatus(row.name, *(getattr(row, name) for name in limits)) for row in rows
    }
    for queue, state, n in reads.rows(COUNTS.format(where=where), *of):
        found.setdefault(queue, QueueStatus(queue)).counts[state] = int(n)
    for name, since in reads.rows(OLDEST_READY.format(only=only), LOOKED_AT_FOR_OLDEST, *of):
        if since is not None and name in found:
            waited = now - reads.dialect().from_db(since)
            found[name].oldest_wait_seconds = max(waited.total_seconds(), 0.0)
    return [found[name] for name in sorted(found)]


def workers(now: datetime) -> list[WorkerStatus]:
    """Return the workers that have not stopped, then a few that did within a day."""
    rows = Worker.objects.using(_alias())
    live = rows.filter(stopped_at__isnull=True).order_by("name", "id")
    stopped = rows.filter(stopped_at__gte=now - DAY).order_by("-stopped_at", "-id")
    held = dict(reads.rows(OPEN_PER_WORKER))
    return [
        WorkerStatus(row, held.get(row.id, 0), _age(row.heartbeat_at, now))
        for row in [*live, *stopped[:MOST_STOPPED_WORKERS]]
    ]


def busiest(queues: list[QueueStatus], most: int) -> list[QueueStatus]:
    """Return at most so many queues, by name: those with the most jobs to do, or dead letters."""
    by_weight = sorted(queues, key=lambda q: q.unfinished + q.counts.get(State.DEAD, 0))
    return sorted(by_weight[-most:], key=lambda queue: queue.name)


def most_urgent(workers: list[WorkerStatus], most: int) -> list[WorkerStatus]:
    """Return at most so many workers: as they are, or those in trouble or under an order first."""
    return workers if len(workers) <= most else sorted(workers, key=_is_well)[:most]


def _is_well(worker: WorkerStatus) -> bool:
    row = worker.row
    silent = worker.heartbeat_age_seconds > SILENT_SECONDS
    return row.stopped_at is not None or not (row.stop_reason or row.ordered or silent)


def queues_of(row: Worker) -> list[str]:
    """Return the queues that a worker names; empty if it serves all, or all but some."""
    return row.queues.split(",") if row.queues and row.queues[0] != "," else []


def excluded_by(row: Worker) -> list[str]:
    """Return the queues that a worker leaves out, where it serves all others."""
    return row.queues[1:].split(",") if row.queues.startswith(",") else []


def serves(row: Worker, queue: str) -> bool:
    """Say whether a worker serves a queue, by the names in its row."""
    named = queues_of(row)
    return queue in named if named else queue not in excluded_by(row)


def unserved(queues: Iterable[QueueStatus], workers: Iterable[WorkerStatus]) -> list[str]:
    """Return the open queues whose jobs wait while workers are heard, none of which serves them."""
    heard = [
        worker.row
        for worker in workers
        if worker.row.stopped_at is None and worker.heartbeat_age_seconds <= SILENT_SECONDS
    ]
    waiting = {State.READY, *NOT_DUE}
    return [
        queue.name
        for queue in queues
        if heard
        and queue.paused_at is None
        and any(queue.counts.get(state) for state in waiting)
        and not any(serves(row, queue.name) for row in heard)
    ]


OVERVIEW_SECONDS: Final = 3.0
"""How long one overview serves all who look at the dashboard: less than the pause between looks."""

_overviews: dict[tuple[str, object], tuple[float, Overview]] = {}
"""The last overview of each database, by its alias and name, and until when it serves."""

_overview_lock = Lock()


def shared_overview() -> Overview:
    """Return an overview that is at most ``OVERVIEW_SECONDS`` old, the same for all threads.

    It counts whole tables: only those may see it who may see all queues, jobs and workers. While
    one thread reads, the others wait for what it finds.
    """
    key = (_alias(), reads.connection().settings_dict["NAME"])
    with _overview_lock:
        until, found = _overviews.get(key, (0.0, None))
        if found is None or time.monotonic() >= until:
            found = read_overview()
            _overviews[key] = (time.monotonic() + OVERVIEW_SECONDS, found)
        return found


def read_overview() -> Overview:
    """Read how everything stands now."""
    now = looks.now()
    return Overview(
        now=now,
        queues=queues(now),
        workers=workers(now),
        hour=history.recent(now),
        day=history.series(now, SPAN, int(DAY / SPAN)),
        next_due=_next_due(),
        refused_last_day=_count_since(REFUSED_SINCE, now - DAY),
        interrupted_last_day=_count_since(INTERRUPTED_SINCE, now - DAY, MOST_INTERRUPTED),
    )


def next_in_line(queue: str, limit: int) -> list[int]:
    """Return the ids of the jobs of a queue that will be claimed next, in that order."""
    return [job_id for (job_id,) in reads.rows(NEXT_OF, queue, limit)]


def recent_leases(worker: Worker, limit: int) -> list[int]:
    """Return the ids of the last leases of a worker that ended, the newest first.

    Looked for among the ``LOOKED_AT_FOR_WORKER`` leases that were granted before it fell silent.
    """
    moment = reads.dialect().to_db(worker.heartbeat_at + AFTER_HEARTBEAT)
    ((last,),) = reads.rows(LAST_GRANTED_BY, moment, moment)
    return [pk for (pk,) in reads.rows(ENDED_OF, last, LOOKED_AT_FOR_WORKER, worker.pk, limit)]


def _age(moment: datetime | None, now: datetime) -> float:
    """Return the seconds since a heartbeat; one that an altered row has no time of is long ago."""
    return (now - moment).total_seconds() if isinstance(moment, datetime) else now.timestamp()


def _alias() -> str:
    return conf.get().database


def _next_due() -> dict[str, datetime]:
    from_db = reads.dialect().from_db
    return {state: from_db(moment) for state, moment in reads.rows(NEXT_DUE, LOOKED_AT_FOR_DUE)}


def _count_since(statement: str, moment: datetime, *limit: int) -> int:
    ((n,),) = reads.rows(statement, reads.dialect().to_db(moment), *limit)
    return int(n)
