"""SQLite's plans: each hot statement is a probe of the index made for it, and no table is scanned.

The statements are caught as the verbs run them, so that what is explained is what is executed. The
tables hold enough rows of every kind for statistics to tempt the planner, with and without ANALYZE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from relay_queue import store
from relay_queue.models import Queue, Worker
from relay_queue.query import looks, status
from relay_queue.store import Settlement
from tests.store.actions import (
    Wall,
    ack,
    after,
    claim,
    claim_one,
    do,
    enqueue,
    job,
    nack,
    register,
)

pytestmark = [
    pytest.mark.usefixtures("wall"),
    pytest.mark.parametrize("engine", ["sqlite"], indirect=True),
]

Statement = tuple[str, Sequence[Any]]


@pytest.fixture(params=["analyzed", "not analyzed"])
def crowded(request: pytest.FixtureRequest, wall: Wall) -> Iterator[Wall]:
    """Fill the tables with finished, waiting, running and ready jobs."""
    workers = [register() for _ in range(3)]
    for _ in range(2):
        do(store.enqueue_many, [job(idempotency_key=None) for _ in range(60)])
        held = claim(60, worker_id=workers[0])
        words = ["ack", "nack"] * 30
        do(
            store.settle,
            [
                Settlement(w, c.lease_id, c.token, fatal=True)
                for w, c in zip(words, held, strict=True)
            ],  # type: ignore[arg-type]
        )
        wall.advance(1)
    do(store.enqueue_many, [job(run_after=after(9_000 + n)) for n in range(80)])
    do(store.enqueue_many, [job(queue=f"q{n % 4}", priority=n % 3) for n in range(80)])
    do(store.enqueue_many, [job(idempotency_key=f"k{n}") for n in range(40)])
    claim(16, "q0", "q1", worker_id=workers[1])
    do(store.stop_workers, workers[:1], "gone")
    if request.param == "analyzed":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")
    yield wall
    if request.param == "analyzed":
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE sqlite_stat1")
        # The statistics live on in the schema that a connection has read.
        connection.close()


@contextmanager
def statements() -> Iterator[list[Statement]]:
    """Note every statement that runs in the block."""
    noted: list[Statement] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        noted.append((sql, params or ()))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        yield noted


def plan(statement: Statement) -> list[str]:
    """Return the steps of SQLite's plan for a statement."""
    sql, params = statement
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {sql}", params)
        return [row[3] for row in cursor.fetchall()]


def only(noted: list[Statement], beginning: str, *containing: str) -> Statement:
    """Return the one statement that begins and reads so."""
    found = [
        (sql, params)
        for sql, params in noted
        if " ".join(sql.split()).startswith(beginning) and all(part in sql for part in containing)
    ]
    assert found, f"no statement begins with {beginning!r} in {[sql for sql, _ in noted]}"
    return found[0]


# Steps that read every row of a table, and sorts of what an index should have ordered.
COSTLY = re.compile(r"SCAN relay_queue_(job|lease)|SCAN [jlw]\b|USE TEMP B-TREE FOR ORDER BY")


def assert_probes(statement: Statement, *indexes: str) -> None:
    steps = plan(statement)
    good = [step for step in steps if any(index in step for index in indexes)]
    assert good, f"none of {indexes} is used: {steps}"
    costly = [step for step in steps if COSTLY.search(step) and step not in good]
    assert not costly, steps


ROWID = "INTEGER PRIMARY KEY"

Act = Callable[[Wall], Any]


def _claim(wall: Wall) -> None:
    assert claim(4, "q2", "q3", worker_id=register())


def _claim_past_suspects(wall: Wall) -> None:
    from relay_queue.models import Job

    Job.objects.filter(queue="q2", state="ready").update(losses=2)
    claim(4, "q2", "q3")


def _claim_by_backend(wall: Wall) -> None:
    assert claim(4, "q2", backends=["default", "other"])


def _settle(wall: Wall) -> None:
    held = claim(4, "q2")
    words = ("ack", "nack", "snooze", "release")
    do(store.settle, [Settlement(w, c.lease_id, c.token) for w, c in zip(words, held, strict=True)])  # type: ignore[arg-type]


def _settle_many(wall: Wall) -> None:
    held = claim(40, "q2", "q3")
    do(store.settle, [Settlement("ack", c.lease_id, c.token) for c in held])


def _refuse(wall: Wall) -> None:
    held = claim_one("q2")
    ack(held)
    nack(held)


def _watch(wall: Wall) -> None:
    assert next(looks.live_workers(but=0))


def _renew(wall: Wall) -> None:
    do(store.renew, [(c.lease_id, c.token, 60.0) for c in claim(4, "q2")])


def _recover_expired(wall: Wall) -> None:
    wall.advance(100)
    assert do(store.recover_expired)


def _recover_dead(wall: Wall) -> None:
    worker_id = register()
    claim(3, "q2", worker_id=worker_id)
    assert do(store.recover_dead, [worker_id, 10**6])


def _promote(wall: Wall) -> None:
    wall.advance(9_050)
    assert do(store.promote)


def _enqueue_key(wall: Wall) -> None:
    enqueue(idempotency_key="k5")
    do(store.enqueue_many, [job(idempotency_key=f"k{n}") for n in range(9)])


def _prune(wall: Wall) -> None:
    assert do(store.prune, "succeeded", wall.now - timedelta(seconds=0.5)).jobs


def _look(wall: Wall) -> None:
    looks.read_queues()
    looks.open_leases([c.lease_id for c in claim(3, "q2")])


def _cancel(wall: Wall) -> None:
    do(store.cancel, [c.job_id for c in claim(3, "q2")])


def _stand(wall: Wall) -> None:
    assert status.next_in_line("q2", 3)
    worker = Worker.objects.earliest("id")
    assert status.recent_leases(worker, 3)
    status.queue_status(Queue.objects.get(pk="q2"), wall.now)


# For each: what runs it, how it begins, what else it contains, and the index that it should probe.
# A scan of an index of open leases is fine: they are as many as there are slots.
HOT: dict[str, tuple[Act, str, tuple[str, ...], str]] = {
    "PICK": (_claim, "SELECT id, losses", (), "relay_job_ready"),
    "PICK past suspects": (
        _claim_past_suspects,
        "SELECT id, losses",
        ("losses <",),
        "relay_job_ready",
    ),
    "PICK by backend": (_claim_by_backend, "SELECT id, losses", ("backend IN",), "relay_job_ready"),
    "CLAIMABLE": (_claim, "SELECT q.name", ("max_running",), "relay_job_ready"),
    "START": (_claim, "UPDATE relay_queue_job", ("'running'",), ROWID),
    "END_LEASES": (_settle, "WITH given", (), ROWID),
    "END_LEASES of many": (_settle_many, "WITH given", (), ROWID),
    "SUCCEED": (_settle, "WITH done", (), ROWID),
    "SUCCEED of many": (_settle_many, "WITH done", (), ROWID),
    "READ_RUNNING": (_settle, "SELECT id, queue, priority, rank", (), ROWID),
    "MOVE": (_settle, "WITH next", (), ROWID),
    "FIND_LONG": (_settle, "WITH given (job_id, outcome)", (), "relay_lease_not_acked"),
    "FIND_REFUSED": (_refuse, "SELECT l.id, l.job_id", (), ROWID),
    "RECORD_REFUSAL": (_refuse, "UPDATE relay_queue_lease SET refused_at", (), ROWID),
    "RENEW": (_renew, "WITH owner", (), ROWID),
    "FIND_EXPIRED": (
        _recover_expired,
        "SELECT id, job_id FROM relay_queue_lease",
        (),
        "relay_lease_expiry",
    ),
    "END_EXPIRED": (
        _recover_expired,
        "UPDATE relay_queue_lease",
        ("'expired'",),
        f"{ROWID}|relay_lease_expiry",
    ),
    "FIND_OF_WORKERS": (
        _recover_dead,
        "SELECT id, job_id FROM relay_queue_lease",
        (),
        "relay_lease_expiry|relay_lease_one_open",
    ),
    "END_LOST": (_recover_dead, "UPDATE relay_queue_lease", ("'lost'",), ROWID),
    "FIND_DUE": (_promote, "SELECT id, queue, state", (), "relay_job_due"),
    "PROMOTE": (
        _promote,
        "UPDATE relay_queue_job SET state = 'ready'",
        (),
        f"{ROWID}|relay_job_due",
    ),
    "FIND_KEYS": (_enqueue_key, "SELECT idempotency_key", (), "relay_job_key"),
    "FIND_LIMITS": (_enqueue_key, "SELECT q.capacity", (), "relay_queue_queue"),
    "FIND_OLD": (_prune, "SELECT id, queue FROM relay_queue_job", (), "relay_job_finished"),
    "COUNT_LEASES": (_prune, "SELECT COUNT(*) FROM (SELECT 1", (), "relay_lease_job"),
    "DELETE_LEASES": (_prune, "DELETE FROM relay_queue_lease", (), "relay_lease_job"),
    "DELETE_JOBS": (_prune, "DELETE FROM relay_queue_job", (), ROWID),
    "READY_QUEUES": (_look, "SELECT q.name", (), "relay_job_ready"),
    "NEXT_DUE": (_look, "SELECT MIN(at)", (), "relay_job_due|relay_schedule_next"),
    "NEXT_EXPIRY": (_look, "SELECT expires_at", (), "relay_lease_expiry"),
    "OPEN_LEASES": (_look, "SELECT id FROM relay_queue_lease WHERE id IN", (), ROWID),
    "CANCEL_LEASES": (
        _cancel,
        "UPDATE relay_queue_lease",
        ("'cancelled'",),
        "relay_lease_one_open|relay_lease_job",
    ),
    "NEXT_OF": (_stand, "SELECT id FROM relay_queue_job", ("ORDER BY rank",), "relay_job_ready"),
    "OLDEST_READY": (_stand, "SELECT q.name, ( SELECT min(", (), "relay_job_ready"),
    "LAST_GRANTED_BY": (_stand, "WITH RECURSIVE half", (), ROWID),
    "ENDED_OF": (_stand, "SELECT near.id", (), ROWID),
    "LIVE_WORKERS": (_watch, "SELECT id, incarnation", (), ROWID),
    "CANCEL": (_cancel, "UPDATE relay_queue_job", ("'cancelled'",), ROWID),
}


@pytest.mark.parametrize(
    "name",
    list(HOT),
)
def test_the_statement_probes_its_index_and_scans_no_table(name: str, crowded: Wall) -> None:
    act, beginning, parts, index = HOT[name]
    with statements() as noted:
        act(crowded)
    assert_probes(only(noted, beginning, *parts), *index.split("|"))


def test_a_batch_of_large_payloads_stays_below_sqlites_limit_of_one_text(wall: Wall) -> None:
    """Two thousand jobs of a mebibyte in one statement would be a text that SQLite refuses."""
    import sqlite3

    connection.ensure_connection()
    raw = connection.connection
    before = raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000_000)
    try:
        answers = do(store.enqueue_many, [job(args=["x" * 500_000]) for _ in range(30)])
    finally:
        raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, before)
    ids = [answer.job_id for answer in answers]
    assert ids == sorted(set(ids))
