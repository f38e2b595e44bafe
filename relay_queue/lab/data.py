"""Filling the database of a scratch project. The one place that fills Relay's tables by plain SQL.

To enqueue and run millions of jobs would take hours, so rows are written with their ledger and the
counters that belong to them. Nobody has the database open meanwhile, and it is never the project's
own: every function writes to the scratch project that this process is in.

`fill` adds copies of one job. `load` leaves what months of work leave: many queues and tasks,
failures, retries and late returns. Its rows differ, so that filters and searches have something to
find. Where the engines use other words for the same, a statement has a name in braces.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.db import connection

from relay_queue import clock, store
from relay_queue.models import Job, Lease, QueueCount
from relay_queue.states import Outcome, State
from relay_queue.store.dialects import dialect_for

QUEUES: Final = ("default", "mail", "reports", "media", "imports")
TASKS: Final = 12
RARE_QUEUE: Final = "yearly"
RARE_TASK: Final = "shop.tasks.close_the_year"
RARE_EVERY: Final = 50_000
WORKERS: Final = 4

ON_FILE: Final = {
    "at": "strftime('%Y-%m-%d %H:%M:%f', 'now', ({0}) || ' seconds')",
    "token": "lower(hex(randomblob(16)))",
}
ON_SERVER: Final = {"at": "now() + ({0}) * interval '1 second'", "token": "md5(random()::text)"}

TABLES: Final = {
    "job": Job._meta.db_table,
    "lease": Lease._meta.db_table,
    "count": QueueCount._meta.db_table,
}

COPY: Final = """
    INSERT INTO {job} ({columns})
    WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < %s)
    SELECT {values} FROM number CROSS JOIN {job} model WHERE model.id = %s
"""
"""Copy a job many times with some columns changed."""

LEDGER: Final = """
    INSERT INTO {lease} (job_id, attempt, token, worker_id, acquired_at, expires_at, ended_at,
                         outcome, error, traceback, refused_verb, refused_reason)
    SELECT id, 1, {token}, 1, created_at, finished_at, finished_at, %s, '', '', '', ''
    FROM {job} WHERE state = %s
"""
"""Give each finished job the lease under which it ran."""

ADD: Final = """
    INSERT INTO {count} (queue, state, shard, n) VALUES (%s, %s, 0, %s)
    ON CONFLICT (queue, state, shard) DO UPDATE SET n = {count}.n + excluded.n
"""
"""Count the copies."""

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


Execute = Callable[..., object]
"""Runs a statement; the parameters, if it has any, come second."""


def fill(model_id: int, *, ready: int, scheduled: int = 0, finished: int = 0) -> None:
    """Add copies of a job that is ready, and leave the database on the disk, ready for use."""
    queue = Job.objects.values_list("queue", flat=True).get(pk=model_id)
    now = connection.ops.adapt_datetimefield_value(clock.now())
    later = connection.ops.adapt_datetimefield_value(clock.now() + timedelta(days=30))
    ran = {"attempt": 1, "started_at": now, "finished_at": now, "result": "null"}
    changes: dict[State, tuple[int, dict[str, Any]]] = {
        State.SUCCEEDED: (finished, ran),
        State.SCHEDULED: (scheduled, {"available_at": later}),
        State.READY: (ready, {}),
    }
    with _bulk() as (execute, words):
        for state, (jobs, changed) in changes.items():
            if jobs:
                _copy(execute, model_id, jobs, {"state": state.value, **changed})
                execute(ADD.format(**TABLES), (queue, state.value, jobs))
        ledger = LEDGER.format(**TABLES, token=words["token"])
        execute(ledger, (Outcome.ACKED.value, State.SUCCEEDED.value))


def _copy(execute: Execute, model_id: int, jobs: int, changed: Mapping[str, Any]) -> None:
    names = [field.attname for field in Job._meta.concrete_fields if not field.primary_key]
    values = ["%s" if name in changed else f"model.{name}" for name in names]
    statement = COPY.format(**TABLES, columns=", ".join(names), values=", ".join(values))
    execute(statement, [jobs, *(changed[name] for name in names if name in changed), model_id])


@contextmanager
def _bulk() -> Iterator[tuple[Execute, Mapping[str, str]]]:
    """Yield what runs statements fast, and the words of the engine.

    A server gathers its statistics at the end, as autovacuum would have done while so many jobs came.
    """
    if dialect_for(connection).has_sessions:
        with connection.cursor() as cursor:
            yield cursor.execute, ON_SERVER
            cursor.execute("VACUUM ANALYZE")
            cursor.execute("CHECKPOINT")
        return
    connection.close()
    with closing(sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)) as bulk:
        # A rollback journal would be written for nothing: what is cut short is thrown away.
        bulk.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; BEGIN")

        def execute(statement: str, parameters: Sequence[Any] = ()) -> None:
            marked = statement.replace("%s", "?") if parameters else statement
            bulk.execute(marked, parameters)

        yield execute, ON_FILE
        bulk.execute("COMMIT")
        # From here on as durable as ever. The commit that turns the log on syncs all of the file, so
        # that the system does not write it behind the back of what is measured.
        bulk.executescript("PRAGMA synchronous=FULL; PRAGMA journal_mode=WAL")


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many jobs `load` makes. ``jobs`` is all of them."""

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


def load(crowd: Crowd) -> None:
    """Put a crowd of jobs into an empty database."""
    with store.transaction() as tx:
        for queue in (*QUEUES, RARE_QUEUE):
            store.ensure_queue(tx, queue)
        for n in range(WORKERS):
            worker = store.NewWorker(f"{n:032}", f"web{n}", f"host{n}", "", n, None, None, [], 16)
            store.register_worker(tx, worker)
    times = {"made": f"i - {crowd.jobs}", "done": f"i - {crowd.jobs} + 5", "due": "i"}
    numbers = {name: getattr(crowd, name) for name in ("jobs", "ended", "dead", "scheduled")}
    with _bulk() as (execute, words):
        moments = {name: words["at"].format(seconds) for name, seconds in times.items()}
        named = {**TABLES, **numbers, **moments, "token": words["token"]}
        for statement in (NUMBERS, JOBS, LEASES, COUNTS):
            execute(statement.format(**named))
