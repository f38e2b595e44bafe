"""PostgreSQL's plans among many finished jobs: no hot statement reads a table from end to end.

Every statement of the verbs is explained with its own values before it runs, with and without
statistics.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from relay_queue import store
from relay_queue.query import list_plans, lists, looks
from relay_queue.query.list_plans import Criteria
from relay_queue.query.lists import ScanReader
from relay_queue.store import Settlement
from relay_queue.store.dialects.pg_cursor import PreparedCursor
from tests.store.actions import (
    Wall,
    after,
    claim,
    claim_one,
    connection,
    do,
    empty,
    enqueue,
    job,
    register,
)

pytestmark = [
    pytest.mark.parametrize("engine", ["postgresql"], indirect=True),
    pytest.mark.slow,
]

FINISHED = 20_000
"""Enough that reading them all is dearer than any index; the plan is the same for a million."""

COPIES = """
    INSERT INTO relay_queue_job ({columns})
    SELECT {columns} FROM relay_queue_job CROSS JOIN generate_series(1, %s) WHERE id = %s
"""
LEASES = """
    INSERT INTO relay_queue_lease (job_id, attempt, token, acquired_at, expires_at, ended_at,
        outcome, error, traceback, refused_verb, refused_reason)
    SELECT id, 1, md5(id::text), created_at, created_at, finished_at, 'acked', '', '', '', ''
    FROM relay_queue_job WHERE state = 'succeeded'
"""
WALK = re.compile(r"Seq Scan on relay_queue_(job|lease)\b")


MANY_READY = 5_000
"""So many that PostgreSQL, told of them, takes the first job of the table that is ready to be near."""

FORGET = """
    DELETE FROM pg_statistic USING pg_class c
    WHERE starelid = c.oid AND relname LIKE 'relay_queue_%'
"""


def analyze() -> None:
    with connection().cursor() as cursor:
        cursor.execute("ANALYZE")


@pytest.fixture(params=["analyzed", "not analyzed", "many ready", "analyzed when all were ready"])
def crowded(request: pytest.FixtureRequest, wall: Wall) -> Wall:
    """Fill the tables with many finished jobs, and some of every other kind.

    The server analyzes by itself at any time, so a plan must be good with statistics of any.
    """
    with connection().cursor() as cursor:
        cursor.execute(FORGET)
    if request.param == "analyzed when all were ready":
        do(store.enqueue_many, [job()] * 1_500)
        analyze()
        empty()
    do(store.ack, *held(claim_of(enqueue())))
    with connection().cursor() as cursor:
        cursor.execute(
            "SELECT string_agg(column_name, ', ') FROM information_schema.columns "
            "WHERE table_name = 'relay_queue_job' AND column_name <> 'id'"
        )
        columns = cursor.fetchone()[0]
        cursor.execute("SELECT max(id) FROM relay_queue_job")
        cursor.execute(COPIES.format(columns=columns), [FINISHED, cursor.fetchone()[0]])
        cursor.execute("DELETE FROM relay_queue_lease")
        cursor.execute(LEASES)
    wall.advance(60)
    do(store.enqueue_many, [job(run_after=after(9_000 + n)) for n in range(80)])
    do(store.enqueue_many, [job(queue=f"q{n % 4}", priority=n % 3) for n in range(400)])
    claim(16, "q0", "q1", worker_id=register())
    if request.param == "many ready":
        do(store.enqueue_many, [job()] * MANY_READY)
    if request.param in ("analyzed", "many ready"):
        analyze()
    return wall


def claim_of(job_id: int) -> store.Claim:
    only = claim_one()
    assert only.job_id == job_id
    return only


def held(claimed: store.Claim) -> tuple[int, str]:
    return claimed.lease_id, claimed.token


def live(wall: Wall) -> None:
    """Do everything that a worker's loop, a producer and an operator do all day."""
    worker_id = register()
    enqueue(queue="q2", idempotency_key="k")
    do(store.enqueue_many, [job(queue="q2", idempotency_key=f"k{n}") for n in range(5)])
    looks.read_queues()
    looks.busy_queues(["default"])
    claim(1, "default")
    taken = claim(16, "q2", "q3", worker_id=worker_id)
    do(store.renew, [(c.lease_id, c.token, 60.0) for c in taken])
    looks.open_leases([c.lease_id for c in taken])
    looks.leases_of(worker_id)
    words = ("ack", "nack", "snooze", "release") * 3
    do(store.settle, [Settlement(w, *held(c)) for w, c in zip(words, taken[:12], strict=True)])  # type: ignore[arg-type]
    do(store.settle, [Settlement("ack", *held(taken[0]))])
    do(store.cancel, [c.job_id for c in taken[12:14]])
    do(store.requeue, [c.job_id for c in taken[12:14]])
    do(store.recover_dead, [worker_id])
    wall.advance(3_600)
    do(store.recover_expired)
    do(store.promote)
    do(store.prune, "succeeded", wall.now - timedelta(days=9))
    do(store.prune, "cancelled", wall.now)


def test_no_hot_statement_reads_a_table_from_end_to_end(
    crowded: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: dict[str, str] = {}
    execute = PreparedCursor.execute

    def explained(self: PreparedCursor, query: str, params: Sequence[object] = ()) -> None:
        words = query.split()
        if words[0] in ("SELECT", "UPDATE", "DELETE", "INSERT", "WITH"):
            execute(self, f"EXPLAIN {query}", params)
            plans[" ".join(words)] = "\n".join(row[0] for row in self.fetchall())
        execute(self, query, params)

    monkeypatch.setattr(PreparedCursor, "execute", explained)
    live(crowded)
    assert len(plans) > 20
    walks = {query: plan for query, plan in plans.items() if WALK.search(plan)}
    assert walks == {}


def test_a_page_of_a_list_reads_hardly_more_jobs_than_it_shows(
    crowded: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = lists.read_names()  # all of the crowd was made at one moment
    asked = Criteria(task=known.tasks[0])
    reader = ScanReader(list_plans.jobs(asked, known))
    assert len(reader.scan.branches) == 5
    plans: list[str] = []
    fetch = lists.reads.rows

    def explained(sql: str, *params: object) -> list[tuple[Any, ...]]:
        explain = "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF)"
        plans.append("\n".join(row[0] for row in fetch(f"{explain} {sql}", *params)))
        return fetch(sql, *params)

    monkeypatch.setattr(lists.reads, "rows", explained)
    assert len(reader.read(None, limit=51)) == 51
    read = [int(rows) for rows in re.findall(r"Scan .*relay_queue_job.*rows=(\d+)", plans[0])]
    assert sum(read) <= 51 + 5, plans[0]
