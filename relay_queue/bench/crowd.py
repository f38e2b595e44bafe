"""A database as months of work leave it: many queues and tasks, failures, retries and late returns.

Written with plain SQL into a scratch database that nobody has open, as `filling` does, since to live
through it would take hours. Rows differ, so that filters and searches have something to find. Where
the engines use other words for the same, the statements have a name in braces.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from django.db import connection

from relay_queue import store
from relay_queue.bench import scratch
from relay_queue.models import Job, Lease, QueueCount

QUEUES: Final = ("default", "mail", "reports", "media", "imports")
TASKS: Final = 12
RARE_QUEUE: Final = "yearly"
RARE_TASK: Final = "shop.tasks.close_the_year"
RARE_EVERY: Final = 50_000
WORKERS: Final = 4

ON_SQLITE: Final = {
    "at": "strftime('%Y-%m-%d %H:%M:%f', 'now', ({0}) || ' seconds')",
    "token": "lower(hex(randomblob(16)))",
}
ON_POSTGRESQL: Final = {"at": "now() + ({0}) * interval '1 second'", "token": "md5(random()::text)"}

NUMBERS: Final = """
    CREATE TEMP TABLE number AS WITH RECURSIVE n (i) AS
        (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {jobs}) SELECT i, CASE
        WHEN i > {ended} + {scheduled} THEN 'ready'
        WHEN i > {ended} THEN 'scheduled'
        WHEN (CAST(i AS bigint) * 7919) % {ended} < {dead} THEN 'dead'
        ELSE 'succeeded' END AS state FROM n
"""
"""One row for each job: the newest are unfinished, and among the older ones some are dead."""

JOBS: Final = f"""
    INSERT INTO {{job}} (id, queue, backend, task, payload, checksum, idempotency_key,
        priority, rank, state, attempt, attempt_base, max_attempts, losses, lease_seconds,
        timeout_seconds, backoff_base_seconds, backoff_max_seconds, backoff_jitter, available_at,
        created_at, started_at, finished_at, result, last_error)
    SELECT i,
        CASE WHEN i % {RARE_EVERY} = 1 THEN '{RARE_QUEUE}' ELSE CASE i % 5
            {" ".join(f"WHEN {n} THEN '{name}'" for n, name in enumerate(QUEUES))} END END,
        'default',
        CASE WHEN i % {RARE_EVERY} = 1 THEN '{RARE_TASK}' ELSE 'shop.tasks.work_' || (i % {TASKS}) END,
        '{{{{"args":[' || i || '],"kwargs":{{{{"address":"reader-' || i || '@example.org"}}}}}}}}',
        1, CASE WHEN i % 20 = 0 THEN 'key-' || i END, i % 5 - 2, i, state,
        CASE WHEN state IN ('ready', 'scheduled') THEN 0 WHEN state = 'dead' THEN 3
            WHEN i % 25 = 0 THEN 2 ELSE 1 END,
        0, 3, 0, 60, NULL, 1, 300, 'none',
        CASE WHEN state = 'scheduled' THEN {{due}} ELSE {{made}} END,
        {{made}},
        CASE WHEN state IN ('succeeded', 'dead') THEN {{made}} END,
        CASE WHEN state IN ('succeeded', 'dead') THEN {{done}} END,
        CASE WHEN state = 'succeeded' THEN 'null' END,
        CASE WHEN state = 'dead' THEN CASE i % 3 WHEN 0 THEN 'TimeoutError: partner ' || i
            ELSE 'ValueError: reader-' || i || ' has no address' END ELSE '' END
    FROM number
"""
"""A job a second, up to now; those that are scheduled come due as far in the future."""

LEASES: Final = f"""
    INSERT INTO {{lease}} (job_id, attempt, token, worker_id, acquired_at, expires_at,
        ended_at, outcome, error, traceback, refused_at, refused_verb, refused_reason)
    SELECT j.id, a.n, {{token}}, 1 + j.id % {WORKERS}, j.started_at, j.finished_at,
        j.finished_at,
        CASE WHEN j.state = 'succeeded' AND a.n = j.attempt THEN 'acked'
             WHEN j.id % 11 = 0 THEN 'lost' ELSE 'failed' END,
        CASE WHEN j.state = 'succeeded' AND a.n = j.attempt THEN '' ELSE 'builtins.ValueError' END,
        '', CASE WHEN j.id % 1100 = 0 AND a.n < j.attempt THEN j.finished_at END,
        CASE WHEN j.id % 1100 = 0 AND a.n < j.attempt THEN 'nack' ELSE '' END,
        CASE WHEN j.id % 1100 = 0 AND a.n < j.attempt THEN 'the lease had ended: lost' ELSE '' END
    FROM {{job}} j JOIN (SELECT 1 AS n UNION SELECT 2 UNION SELECT 3) a ON a.n <= j.attempt
    ORDER BY j.id
"""
"""The ledger: each attempt but the last of a job that succeeded has failed or was lost."""

COUNTS: Final = """
    INSERT INTO {count} (queue, state, shard, n)
    SELECT queue, state, 0, COUNT(*) FROM {job} GROUP BY queue, state
"""


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many jobs a database has. ``jobs`` is all of them."""

    finished: int
    ready: int
    dead: int
    scheduled: int = 0

    @property
    def jobs(self) -> int:
        """All jobs; their ids go from 1 to this."""
        return self.ended + self.scheduled + self.ready

    @property
    def ended(self) -> int:
        """The oldest jobs, which are done with."""
        return self.finished + self.dead

    def statements(self, words: Mapping[str, str]) -> Iterator[str]:
        """Yield what makes the crowd, in an engine's words."""
        times = {"made": f"i - {self.jobs}", "done": f"i - {self.jobs} + 5", "due": "i"}
        named = {
            **{name: words["at"].format(seconds) for name, seconds in times.items()},
            "token": words["token"],
            "jobs": self.jobs,
            "ended": self.ended,
            "dead": self.dead,
            "scheduled": self.scheduled,
            "job": Job._meta.db_table,
            "lease": Lease._meta.db_table,
            "count": QueueCount._meta.db_table,
        }
        for statement in (NUMBERS, JOBS, LEASES, COUNTS):
            yield statement.format(**named)


def settle_down(database: Path, crowd: Crowd) -> None:
    """Make a new file with a crowd in it the database that this process uses."""
    scratch.use(database)
    _prepare()
    connection.close()
    bulk = sqlite3.connect(database, isolation_level=None)
    # A rollback journal would be written for nothing: what is cut short is thrown away.
    bulk.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; BEGIN")
    for statement in crowd.statements(ON_SQLITE):
        bulk.execute(statement)
    bulk.execute("COMMIT")
    bulk.executescript("PRAGMA synchronous=FULL; PRAGMA journal_mode=WAL")
    bulk.close()


def settle_on_server(crowd: Crowd) -> None:
    """Put a crowd into the empty database of PostgreSQL that this process uses.

    Its statistics are gathered then, as autovacuum would have done while so many jobs came.
    """
    _prepare()
    with connection.cursor() as cursor:
        for statement in crowd.statements(ON_POSTGRESQL):
            cursor.execute(statement)
        cursor.execute("VACUUM ANALYZE")
        cursor.execute("CHECKPOINT")


def _prepare() -> None:
    """Add the few rows that the store can write itself."""
    with store.transaction() as tx:
        for queue in (*QUEUES, RARE_QUEUE):
            store.ensure_queue(tx, queue)
        for n in range(WORKERS):
            worker = store.NewWorker(f"{n:032}", f"web{n}", f"host{n}", "", n, None, None, [], 16)
            store.register_worker(tx, worker)
