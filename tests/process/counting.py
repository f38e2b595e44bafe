"""Jobs that count in a row of the queue's database, and a late owner that tries to."""

from __future__ import annotations

import os
import time

from django.db import connection

from relay_queue.backoff import Backoff
from relay_queue.context import RelayContext
from relay_queue.task import task

TABLES = (
    "CREATE TABLE counter (name text PRIMARY KEY, n integer NOT NULL)",
    "CREATE TABLE counted (job_id integer NOT NULL, epoch integer NOT NULL)",
)
AT_ONCE = Backoff(base_seconds=0.01, max_seconds=0.05)


def add_one(name: str, context: RelayContext, seconds: float) -> None:
    """Add one to the row in two steps, as a program does that reads, thinks and writes."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT n FROM counter WHERE name = %s", [name])
        (n,) = cursor.fetchone()
        if seconds:
            time.sleep(seconds)
        cursor.execute("UPDATE counter SET n = %s WHERE name = %s", [n + 1, name])
        cursor.execute("INSERT INTO counted VALUES (%s, %s)", [context.job_id, context.epoch])


@task(takes_context=True, atomic=True, timeout_seconds=2, max_attempts=1000, backoff=AT_ONCE)
def count(context: RelayContext, name: str, seconds: float = 0) -> None:
    add_one(name, context, seconds)


def be_late(ready: str, go: str) -> None:
    """Claim a job as a worker does, begin it only when told, and print what became of it."""
    from relay_queue import store
    from relay_queue.context import JobContext
    from relay_queue.worker.attempt import Attempt
    from relay_queue.worker.executor import execute

    with store.transaction() as tx:
        (claim,) = store.claim(tx, worker_id=None, queues=["default"], limit=1)
    open(ready, "w").close()
    while not os.path.exists(go):
        time.sleep(0.01)
    finished = execute(Attempt(claim, JobContext.of(claim)))
    settled = finished.settled
    if settled is None:
        with store.transaction() as tx:
            (settled,) = store.settle(tx, [finished.settlement])
    print(finished.settlement.verb, settled.accepted, finished.settlement.message)
