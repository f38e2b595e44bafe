"""Scratch databases on a PostgreSQL server, and what is put into them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

from django.core.management import call_command
from django.db import Error, connection

from relay_queue import clock
from relay_queue.bench import scratch
from relay_queue.bench.families import SERVER_VARIABLE as VARIABLE
from relay_queue.bench.loops import one_by_one
from relay_queue.bench.measuring import BenchError
from relay_queue.models import Job, Lease, QueueCount
from relay_queue.scratch.server import Server
from relay_queue.states import Outcome, State

PREFIX: Final = "relay_bench_"

COPY: Final = """
    INSERT INTO bare_job ({columns})
    SELECT {columns} FROM relay_queue_job CROSS JOIN generate_series(1, %s) LIMIT %s
"""
COPIES: Final = """
    INSERT INTO {job} ({columns}) SELECT {values}
    FROM {job} AS model CROSS JOIN generate_series(1, %s) WHERE model.id = %s
"""
LEDGER: Final = """
    INSERT INTO {lease} (job_id, attempt, token, worker_id, acquired_at, expires_at, ended_at,
                         outcome, error, traceback, refused_verb, refused_reason)
    SELECT id, 1, md5(id::text), 1, created_at, created_at, finished_at, %s, '', '', '', ''
    FROM {job} WHERE state = %s
"""
ADD: Final = """
    INSERT INTO {count} (queue, state, shard, n) VALUES (%s, %s, 0, %s)
    ON CONFLICT (queue, state, shard) DO UPDATE SET n = {count}.n + excluded.n
"""


def entry() -> dict[str, Any]:
    """Return the settings of the server that is measured. Raises `BenchError` if none is."""
    if VARIABLE not in os.environ:
        raise BenchError("this figure needs PostgreSQL; name its alias with --database")
    settings: dict[str, Any] = json.loads(os.environ[VARIABLE])
    return settings


@contextmanager
def scratch_database() -> Iterator[str]:
    """Make a migrated database on the server, use it in this process and its workers, drop it.

    Raises `BenchError` if the server would not keep its commits, or lets us make no database.
    """
    name = f"{PREFIX}{uuid4().hex[:12]}"
    with ExitStack() as stack:
        try:
            stack.enter_context(Server(entry()).database(name))
        except Error as error:
            hint = "The role needs CREATEDB: ALTER ROLE … CREATEDB."
            raise BenchError(f"no scratch database: {error}. {hint}") from error
        stack.callback(connection.close)
        switch(name)
        call_command("migrate", verbosity=0)
        _require_durable()
        yield name


def switch(name: str) -> None:
    """Use another scratch database from now on."""
    connection.close()
    os.environ["RELAY_BENCH_DB"] = name
    connection.settings_dict["NAME"] = name


def _arguments(name: str) -> dict[str, Any]:
    keys = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password"}
    given = {keys[key]: value for key, value in entry().items() if key in keys and value}
    return {**given, "dbname": name}


def _require_durable() -> None:
    with connection.cursor() as cursor:
        for name, sound in (("synchronous_commit", "on"), ("fsync", "on")):
            cursor.execute("SELECT current_setting(%s)", [name])
            value = cursor.fetchone()[0]
            if value != sound:
                raise BenchError(
                    f"the server has {name}={value}; speeds are only measured with {sound}"
                )


def one_job_a_transaction(jobs: int, processes: int) -> float:
    """Return the jobs a second of loops that take and finish one job in each transaction.

    What a plain queue does: pick with SKIP LOCKED, mark as done, commit. The jobs lie in a copy of
    Relay's table with its indexes; there are no leases, no tokens and no counters.
    """
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE bare_job (LIKE relay_queue_job INCLUDING ALL)")
        cursor.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'relay_queue_job'::regclass "
            "AND attnum > 0 AND NOT attisdropped AND attname <> 'id'"
        )
        columns = ", ".join(name for (name,) in cursor.fetchall())
        cursor.execute(COPY.format(columns=columns), [jobs, jobs])
        cursor.execute("UPDATE bare_job SET state = 'ready', finished_at = NULL, attempt = 0")
        cursor.execute("VACUUM ANALYZE bare_job")
    return one_by_one(_arguments(str(connection.settings_dict["NAME"])), jobs, processes)


def fill(*, ready: int, scheduled: int = 0, finished: int = 0) -> None:
    """Add copies of one real job to the database in use; see `relay_queue.bench.filling`.

    Their statistics are gathered then, as autovacuum would have done while so many jobs came.
    """
    scratch.enqueue(1)
    now = clock.now()
    ran = {"attempt": 1, "started_at": now, "finished_at": now, "result": "null"}
    _copy(finished, {"state": State.SUCCEEDED.value, **ran})
    _copy(scheduled, {"state": State.SCHEDULED.value, "available_at": now + timedelta(days=30)})
    _copy(ready, {})
    with connection.cursor() as cursor:
        cursor.execute(_named(LEDGER), [Outcome.ACKED.value, State.SUCCEEDED.value])
        cursor.execute("VACUUM ANALYZE")
        cursor.execute("CHECKPOINT")


def _copy(jobs: int, changed: dict[str, Any]) -> None:
    if not jobs:
        return
    names = [field.attname for field in Job._meta.concrete_fields if not field.primary_key]
    values = ["%s" if name in changed else f"model.{name}" for name in names]
    statement = _named(COPIES, columns=", ".join(names), values=", ".join(values))
    params = [changed[name] for name in names if name in changed]
    model = Job.objects.order_by("id").values_list("id", "state")[0]
    with connection.cursor() as cursor:
        cursor.execute(statement, [*params, jobs, model[0]])
        cursor.execute(_named(ADD), [scratch.QUEUE, changed.get("state", model[1]), jobs])


def _named(statement: str, **more: str) -> str:
    tables = {"job": Job, "lease": Lease, "count": QueueCount}
    return statement.format(**{key: model._meta.db_table for key, model in tables.items()}, **more)
