"""The overview tells how everything stands, from counters and indexes alone."""

import re

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from relay_queue import conf, store
from relay_queue.query import status
from relay_queue.states import State
from tests.store import actions
from tests.store.test_query_plans_sqlite import plan, statements

# The statements are those of the default connection, and the plans are SQLite's.
only_sqlite = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)

# A step that reads a whole table of jobs or leases, or all of an index on every one of them.
WALK = re.compile(
    r"SCAN (relay_queue_(job|lease)|[jl])\b(?! USING (COVERING )?INDEX relay_(job_due|lease_(expiry|refused|interrupted)))"
)


def test_jobs_are_counted_over_all_queues(wall: actions.Wall) -> None:
    actions.enqueue_each(2)
    actions.enqueue(queue="mail")
    actions.enqueue(queue="mail", run_after=actions.after(60))
    found = status.read_overview()
    assert found.jobs(State.READY) == 3
    assert found.jobs(State.SCHEDULED) == 1
    assert found.jobs(State.DEAD) == 0


def test_next_due_is_told_apart_by_state(wall: actions.Wall) -> None:
    actions.enqueue(run_after=actions.after(500))
    actions.enqueue()
    actions.nack(actions.claim_one(), delay_seconds=900.0)
    assert status.read_overview().next_due == {
        "scheduled": actions.after(500),
        "retrying": actions.after(900),
    }


def test_job_taken_from_its_owner_may_run_twice(wall: actions.Wall) -> None:
    actions.enqueue(lease_seconds=10.0)
    for _ in range(2):  # one job, however often
        actions.claim_one()
        wall.advance(1_000)
        actions.do(store.recover_expired)
        actions.do(store.promote)
    assert status.read_overview().interrupted_last_day == 1
    wall.advance(86_401)
    assert status.read_overview().interrupted_last_day == 0


def test_late_return_is_counted_for_a_day(wall: actions.Wall) -> None:
    actions.enqueue()
    lease = actions.claim_one()
    actions.cancel(lease.job_id)
    actions.ack(lease)
    assert status.read_overview().refused_last_day == 1
    wall.advance(86_401)
    assert status.read_overview().refused_last_day == 0


def test_number_of_reads_does_not_grow_with_the_data(wall: actions.Wall) -> None:
    connection = connections[conf.get().database]
    with CaptureQueriesContext(connection) as before:
        status.read_overview()
    for n in range(12):
        actions.enqueue(queue=f"q{n}")
        actions.register(name=f"worker-{n}")
        actions.claim_one(f"q{n}")
        actions.enqueue(queue=f"q{n}")
    with CaptureQueriesContext(connection) as after:
        status.read_overview()
    assert 0 < len(after) == len(before) <= 15, "PostgreSQL is asked for its clock as well"


@only_sqlite
@pytest.mark.parametrize("analyzed", [False, True])
def test_no_read_walks_through_jobs_or_leases(wall: actions.Wall, analyzed: bool) -> None:
    for n in range(60):
        actions.enqueue(queue=f"q{n % 3}")
        actions.ack(actions.claim_one(f"q{n % 3}"))
    actions.enqueue_each(20)
    with connection.cursor() as cursor:
        if analyzed:
            cursor.execute("ANALYZE")
    with statements() as noted:
        status.read_overview()
    try:
        steps = [step for statement in noted for step in plan(statement)]
    finally:
        if analyzed:
            with connection.cursor() as cursor:
                cursor.execute("DROP TABLE sqlite_stat1")
            connection.close()
    assert not [step for step in steps if WALK.search(step)], steps
    for index in ("ready", "due"):
        assert any(f"relay_job_{index}" in step for step in steps), steps
    for index in ("refused", "interrupted", "expiry"):
        assert any(f"relay_lease_{index}" in step for step in steps), steps


@only_sqlite
def test_reading_takes_no_write_lock(wall: actions.Wall) -> None:
    with statements() as noted:
        status.read_overview()
    assert {sql.split()[0] for sql, _ in noted} == {"SELECT"}
