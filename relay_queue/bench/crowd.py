"""A database as months of work leave it: many queues and tasks, failures, retries and late returns.

Written with plain SQL into a scratch database that nobody has open, as `filling` does, since to live
through it would take hours. Rows differ, so that filters and searches have something to find. In the
statements ``@job`` stands for the table of jobs, and so on: only a scratch database is meant.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from django.db import connection

from relay_queue import store
from relay_queue.bench import scratch

QUEUES: Final = ("default", "mail", "reports", "media", "imports")
TASKS: Final = 12
RARE_QUEUE: Final = "yearly"
RARE_TASK: Final = "shop.tasks.close_the_year"
RARE_EVERY: Final = 50_000
WORKERS: Final = 4

NUMBERS: Final = """
    CREATE TEMP TABLE number AS WITH RECURSIVE n (i) AS
        (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :jobs) SELECT i, CASE
        WHEN i > :ended THEN 'ready'
        WHEN (i * 7919) % :ended < :dead THEN 'dead'
        ELSE 'succeeded' END AS state FROM n
"""
"""One row for each job: the newest are ready, and among the older ones some are dead."""

JOBS: Final = f"""
    INSERT INTO @job (id, queue, backend, task, payload, checksum, idempotency_key,
        priority, rank, state, attempt, attempt_base, max_attempts, losses, lease_seconds,
        timeout_seconds, backoff_base_seconds, backoff_max_seconds, backoff_jitter, available_at,
        created_at, started_at, finished_at, result, last_error)
    SELECT i,
        CASE WHEN i % {RARE_EVERY} = 1 THEN '{RARE_QUEUE}' ELSE CASE i % 5
            {" ".join(f"WHEN {n} THEN '{name}'" for n, name in enumerate(QUEUES))} END END,
        'default',
        CASE WHEN i % {RARE_EVERY} = 1 THEN '{RARE_TASK}' ELSE 'shop.tasks.work_' || (i % {TASKS}) END,
        '{{"args":[' || i || '],"kwargs":{{"address":"reader-' || i || '@example.org"}}}}',
        1, CASE WHEN i % 20 = 0 THEN 'key-' || i END, i % 5 - 2, i, state,
        CASE state WHEN 'ready' THEN 0 WHEN 'dead' THEN 3 ELSE 1 + (i % 25 = 0) END,
        0, 3, 0, 60, NULL, 1, 300, 'none',
        strftime('%Y-%m-%d %H:%M:%f', 'now', (i - :jobs) || ' seconds'),
        strftime('%Y-%m-%d %H:%M:%f', 'now', (i - :jobs) || ' seconds'),
        CASE WHEN state <> 'ready' THEN strftime('%Y-%m-%d %H:%M:%f', 'now', (i - :jobs) || ' seconds') END,
        CASE WHEN state <> 'ready' THEN strftime('%Y-%m-%d %H:%M:%f', 'now', (i - :jobs + 5) || ' seconds') END,
        CASE WHEN state = 'succeeded' THEN 'null' END,
        CASE WHEN state = 'dead' THEN CASE i % 3 WHEN 0 THEN 'TimeoutError: partner ' || i
            ELSE 'ValueError: reader-' || i || ' has no address' END ELSE '' END
    FROM number
"""
"""A job a second, up to now."""

LEASES: Final = f"""
    INSERT INTO @lease (job_id, attempt, token, worker_id, acquired_at, expires_at,
        ended_at, outcome, error, traceback, refused_at, refused_verb, refused_reason)
    SELECT j.id, a.n, lower(hex(randomblob(16))), 1 + j.id % {WORKERS}, j.started_at, j.finished_at,
        j.finished_at,
        CASE WHEN j.state = 'succeeded' AND a.n = j.attempt THEN 'acked'
             WHEN j.id % 11 = 0 THEN 'lost' ELSE 'failed' END,
        CASE WHEN j.state = 'succeeded' AND a.n = j.attempt THEN '' ELSE 'builtins.ValueError' END,
        '', CASE WHEN j.id % 1100 = 0 AND a.n < j.attempt THEN j.finished_at END,
        CASE WHEN j.id % 1100 = 0 AND a.n < j.attempt THEN 'nack' ELSE '' END,
        CASE WHEN j.id % 1100 = 0 AND a.n < j.attempt THEN 'the lease had ended: lost' ELSE '' END
    FROM relay_queue_job j JOIN (SELECT 1 AS n UNION SELECT 2 UNION SELECT 3) a ON a.n <= j.attempt
"""
"""The ledger: each attempt but the last of a job that succeeded has failed or was lost."""

COUNTS: Final = """
    INSERT INTO @queuecount (queue, state, shard, n)
    SELECT queue, state, 0, COUNT(*) FROM relay_queue_job GROUP BY queue, state
"""


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many jobs a database has. ``jobs`` is all of them."""

    finished: int
    ready: int
    dead: int

    @property
    def jobs(self) -> int:
        """All jobs; their ids go from 1 to this."""
        return self.finished + self.ready + self.dead


def settle_down(database: Path, crowd: Crowd) -> None:
    """Make a new database with a crowd in it the one that this process uses."""
    scratch.use(database)
    _prepare()
    connection.close()
    bulk = sqlite3.connect(database, isolation_level=None)
    # A rollback journal would be written for nothing: what is cut short is thrown away.
    bulk.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; BEGIN")
    numbers = {"jobs": crowd.jobs, "ended": crowd.finished + crowd.dead, "dead": crowd.dead}
    bulk.execute(NUMBERS.replace(":jobs", str(crowd.jobs)), numbers)
    for statement in (JOBS, LEASES, COUNTS):
        bulk.execute(statement.replace("@", "relay_queue_", 1), numbers)
    bulk.execute("COMMIT")
    bulk.executescript("PRAGMA synchronous=FULL; PRAGMA journal_mode=WAL")
    bulk.close()


def _prepare() -> None:
    """Add the few rows that the store can write itself."""
    with store.transaction() as tx:
        for queue in (*QUEUES, RARE_QUEUE):
            store.ensure_queue(tx, queue)
        for n in range(WORKERS):
            worker = store.NewWorker(f"{n:032}", f"web{n}", f"host{n}", "", n, None, None, [], 16)
            store.register_worker(tx, worker)
