"""What a test does to the store, each step in a transaction of its own, and honest looks at the rows.

Everything here works on any engine: the store's verbs to write, the models to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

from django.db import connections, transaction
from django.db.models import Model, QuerySet

from relay_queue import conf, store
from relay_queue.models import (
    BulkAct,
    Job,
    Lease,
    Queue,
    QueueCount,
    QueueMinute,
    Schedule,
    ScheduleRun,
    Worker,
)
from relay_queue.operations import CANCEL

START = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
TASK = "tests.tasks.anything"

# Children before parents, so that they can be emptied in this order.
TABLES: tuple[type[Model], ...] = (
    Lease,
    Job,
    QueueCount,
    Queue,
    Worker,
    QueueMinute,
    BulkAct,
    Schedule,
    ScheduleRun,
)

ADD_LEASES = """
    INSERT INTO relay_queue_lease (job_id, attempt, token, acquired_at, expires_at, ended_at,
                                   outcome, error, traceback, refused_verb, refused_reason)
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %s)
    SELECT j.id, CASE WHEN %s = 'failed' THEN n.i ELSE 1 END, 'token', j.created_at, j.created_at,
           j.created_at, %s, '', '', '', ''
    FROM n, relay_queue_job j WHERE j.id = %s ORDER BY n.i
"""
"""Insert ended leases of one job, numbered as if each were charged, or none."""

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Model)


class Wall:
    """A wall clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> datetime:
        """Move the clock by ``seconds``, backwards if negative, and return the new time."""
        self.now += timedelta(seconds=seconds)
        return self.now


def after(seconds: float) -> datetime:
    """Return the time that many seconds after the start of the test."""
    return START + timedelta(seconds=seconds)


def do(
    verb: Callable[Concatenate[store.Transaction, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run one verb of the store in a transaction of its own."""
    with store.transaction() as tx:
        return verb(tx, *args, **kwargs)


def job(**options: Any) -> store.NewJob:
    """Prepare a job; only what a test names differs from the defaults."""
    return store.new_job(**{"task": TASK, **options})


def enqueue(**options: Any) -> int:
    """Enqueue one job and return its id."""
    return do(store.enqueue, job(**options)).job_id


def enqueue_each(count: int, **options: Any) -> list[int]:
    """Enqueue ``count`` equal jobs, one transaction each, and return their ids."""
    return [enqueue(**options) for _ in range(count)]


def claim(
    limit: int = 1, *queues: str, worker_id: int | None = None, **options: Any
) -> list[store.Claim]:
    """Claim up to ``limit`` jobs of ``queues``, by default of the queue "default"."""
    return do(
        store.claim, worker_id=worker_id, queues=queues or ("default",), limit=limit, **options
    )


def claim_one(*queues: str, **options: Any) -> store.Claim:
    """Claim the one job that is ready."""
    (only,) = claim(1, *queues, **options)
    return only


def claimed_ids(limit: int, *queues: str, **options: Any) -> list[int]:
    """Claim and return the ids of the jobs in the order of the deal."""
    return [c.job_id for c in claim(limit, *queues, **options)]


def ack(held: store.Claim, result: str = "null") -> store.Settled:
    """Tell that a claimed job succeeded."""
    return do(store.ack, held.lease_id, held.token, result)


def nack(held: store.Claim, **options: Any) -> store.Settled:
    """Tell that a claimed job failed."""
    return do(store.nack, held.lease_id, held.token, **options)


def snooze(held: store.Claim, seconds: float) -> store.Settled:
    """Ask for a claimed job to be run again later."""
    return do(store.snooze, held.lease_id, held.token, seconds)


def release(held: store.Claim) -> store.Settled:
    """Hand a claimed job back."""
    return do(store.release, held.lease_id, held.token)


def cancel(job_id: int) -> None:
    """Cancel one job."""
    do(CANCEL.change_one, job_id)


def kill(held: store.Claim) -> store.Recovered:
    """Let the owner of a claimed job die and end its lease as lost."""
    worker_id = read_lease(held.lease_id).worker_id
    assert worker_id is not None, "only a job claimed by a registered worker can be lost"
    (recovered,) = do(store.recover_dead, [worker_id])
    return recovered


def lose(job_id: int, times: int, wall: Wall) -> None:
    """Let ``times`` owners of the only ready job die one after the other, and wake it again."""
    for _ in range(times):
        held = claim_one(read(job_id).queue, worker_id=register(), suspects=1)
        assert held.job_id == job_id
        kill(held)
        wall.advance(300)
        do(store.promote)


def register(**options: Any) -> int:
    """Register a worker of a unique incarnation and return its id."""
    values = {
        "incarnation": f"{rows(Worker).count():032x}",
        "name": "worker",
        "host": "host",
        "boot_id": "boot",
        "pid": 1,
        "lock_device": 2,
        "lock_inode": 3,
        "queues": ["default"],
        "concurrency": 8,
    }
    return do(store.register_worker, store.NewWorker(**{**values, **options}))


def rows(model: type[M]) -> QuerySet[M]:
    """Return the rows of a table, on the database that holds the queue."""
    return model._default_manager.using(conf.get().database)


def read(job_id: int) -> Job:
    """Read a job."""
    return rows(Job).get(pk=job_id)


def state(job_id: int) -> str:
    """Read the state of a job."""
    return read(job_id).state


def read_lease(lease_id: int) -> Lease:
    """Read a lease."""
    return rows(Lease).get(pk=lease_id)


def outcomes(job_id: int) -> list[str | None]:
    """Read the outcomes of a job's leases, oldest first; None is an open one."""
    return list(rows(Lease).filter(job_id=job_id).order_by("id").values_list("outcome", flat=True))


def connection() -> Any:
    """Return this thread's connection to the database that holds the queue."""
    return connections[conf.get().database]


def atomic() -> Any:
    """Open a transaction as a project does, on the database that holds the queue."""
    return transaction.atomic(using=connection().alias)


def everything() -> dict[str, list[tuple[Any, ...]]]:
    """Read every row of every table of the queue."""
    return {m.__name__: list(rows(m).order_by("pk").values_list()) for m in TABLES}


@contextmanager
def nothing_written() -> Iterator[None]:
    """Fail if the block changed any row of any table of the queue."""
    before = everything()
    yield
    assert everything() == before


def counted() -> dict[tuple[str, str], int]:
    """Read the counters, without the zeros."""
    sums: Counter[tuple[str, str]] = Counter()
    for queue, name, n in rows(QueueCount).values_list("queue", "state", "n"):
        sums[queue, name] += n
    return {key: n for key, n in sums.items() if n}


def real_counts() -> dict[tuple[str, str], int]:
    """Count the jobs by queue and state, from the jobs themselves."""
    return dict(Counter(rows(Job).values_list("queue", "state")))


def assert_counters_exact() -> None:
    """Fail unless the counters equal the jobs they count."""
    assert counted() == real_counts()


class _RollBack(Exception):
    """Ends a transaction whose work is to be undone."""


@contextmanager
def rolled_back() -> Iterator[store.Transaction]:
    """Open a transaction that is rolled back at the end of the block."""
    try:
        with store.transaction() as tx:
            yield tx
            raise _RollBack
    except _RollBack:
        return


def empty() -> None:
    """Delete every row of every table of the queue."""
    alias = conf.get().database
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        for model in TABLES:
            cursor.execute(f"DELETE FROM {model._meta.db_table}")


def settle(settlements: Sequence[store.Settlement]) -> list[store.Settled]:
    """Settle several leases in one transaction."""
    return do(store.settle, settlements)


def add_leases(job_id: int, count: int, outcome: str = "snoozed") -> None:
    """Give a job that was never leased ``count`` ended leases, as its function would have made."""
    with connections[conf.get().database].cursor() as cursor:
        cursor.execute(ADD_LEASES, [count, outcome, outcome, job_id])
        if outcome == "failed":
            cursor.execute(
                "UPDATE relay_queue_job SET attempt = %s, attempt_base = %s WHERE id = %s",
                [count, count, job_id],
            )
