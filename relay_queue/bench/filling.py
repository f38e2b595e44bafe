"""Filling a scratch database with rows by the million.

Enqueueing them would take minutes, so copies of one real job are written with plain SQL, with the
counters that belong to them. Nobody has the database open meanwhile. This is the one place outside
the store that writes Relay's tables, and it can only write a scratch database.
"""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.db import connection

from relay_queue import clock
from relay_queue.bench import scratch
from relay_queue.models import Job, Lease, QueueCount
from relay_queue.states import Outcome, State

COPY = """
    WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?)
    INSERT INTO {job} ({columns}) SELECT {values} FROM number, {job} model WHERE model.id = ?
"""
"""Copy a job many times with some columns changed."""

LEDGER = """
    INSERT INTO {lease} (job_id, attempt, token, worker_id, acquired_at, expires_at, ended_at,
                         outcome, error, traceback, refused_verb, refused_reason)
    SELECT id, 1, lower(hex(randomblob(16))), 1, created_at, finished_at, finished_at, ?,
           '', '', '', '' FROM {job} WHERE state = ?
"""
"""Give each finished job the lease under which it ran."""

ADD = """
    INSERT INTO {count} (queue, state, shard, n) VALUES (?, ?, 0, ?)
    ON CONFLICT (queue, state, shard) DO UPDATE SET n = n + excluded.n
"""
"""Count the copies."""


def fill(database: Path, *, ready: int, scheduled: int = 0, finished: int = 0) -> None:
    """Add jobs to a new database that `scratch.use` has made, and sync it to the disk."""
    scratch.enqueue(1)
    now = clock.now()
    connection.close()
    moment, later = (str(at.replace(tzinfo=None)) for at in (now, now + timedelta(days=30)))
    changes: dict[State, tuple[int, dict[str, Any]]] = {
        State.SUCCEEDED: (
            finished,
            {"attempt": 1, "started_at": moment, "finished_at": moment, "result": "null"},
        ),
        State.SCHEDULED: (scheduled, {"available_at": later}),
        State.READY: (ready, {}),
    }
    bulk = sqlite3.connect(database, isolation_level=None)
    # A rollback journal would be written for nothing: what is cut short is thrown away.
    bulk.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; BEGIN")
    for state, (jobs, changed) in changes.items():
        if jobs:
            _copy(bulk, jobs, {"state": state.value, **changed})
    bulk.execute(_named(LEDGER), (Outcome.ACKED.value, State.SUCCEEDED.value))
    bulk.execute("COMMIT")
    # From here on as durable as ever. The commit that turns the log on syncs all of the file, so
    # that the system does not write it behind the back of what is measured.
    bulk.executescript("PRAGMA synchronous=FULL; PRAGMA journal_mode=WAL")
    bulk.close()


def _copy(bulk: sqlite3.Connection, jobs: int, changed: dict[str, Any]) -> None:
    names = [field.attname for field in Job._meta.concrete_fields if not field.primary_key]
    values = ["?" if name in changed else f"model.{name}" for name in names]
    statement = _named(COPY, columns=", ".join(names), values=", ".join(values))
    params = [changed[name] for name in names if name in changed]
    bulk.execute(statement, [jobs, *params, 1])
    bulk.execute(_named(ADD), (scratch.QUEUE, changed["state"], jobs))


def _named(statement: str, **more: str) -> str:
    tables = {"job": Job, "lease": Lease, "count": QueueCount}
    return statement.format(**{key: model._meta.db_table for key, model in tables.items()}, **more)
