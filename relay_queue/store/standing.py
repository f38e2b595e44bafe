"""Standing: how one queue stands, and what one worker had last, in short reads at any size."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from relay_queue.models import Queue, Worker
from relay_queue.store import reads
from relay_queue.store.report import LOOKED_AT_FOR_OLDEST, QueueStatus, waited_seconds

COUNTS_OF = """
    SELECT state, SUM(n) FROM relay_queue_queuecount
    WHERE queue = %s GROUP BY state HAVING SUM(n) <> 0
"""
"""Read how many jobs a queue has in each state."""

OLDEST_OF = """
    SELECT min(n.available_at) FROM (
        SELECT available_at FROM relay_queue_job
        WHERE queue = %s AND state = 'ready' ORDER BY rank, id LIMIT %s) AS n
"""
"""Find since when the oldest of the jobs next in line has been ready."""

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


def of_queue(queue: Queue, now: datetime) -> QueueStatus:
    """Return how one queue stands; see `relay_queue.store.report.queues`."""
    limits = (queue.capacity, queue.max_running, queue.aging_seconds, queue.paused_at)
    counts = {state: int(n) for state, n in reads.rows(COUNTS_OF, queue.pk)}
    ((since,),) = reads.rows(OLDEST_OF, queue.pk, LOOKED_AT_FOR_OLDEST)
    waited = None if since is None else waited_seconds(since, now)
    return QueueStatus(queue.pk, *limits, counts, waited)


def next_in_line(queue: str, limit: int) -> list[int]:
    """Return the ids of the jobs of a queue that will be claimed next, in that order."""
    return [job_id for (job_id,) in reads.rows(NEXT_OF, queue, limit)]


def last_ended(worker: Worker, limit: int) -> list[int]:
    """Return the ids of the last leases of a worker that ended, the newest first.

    Looked for among the ``LOOKED_AT_FOR_WORKER`` leases that were granted before it fell silent.
    """
    moment = reads.dialect().to_db(worker.heartbeat_at + AFTER_HEARTBEAT)
    ((last,),) = reads.rows(LAST_GRANTED_BY, moment, moment)
    return [pk for (pk,) in reads.rows(ENDED_OF, last, LOOKED_AT_FOR_WORKER, worker.pk, limit)]
