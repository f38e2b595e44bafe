"""Errors of tables and rights: no job is condemned for them, and workers go on when they are gone."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from relay_queue import store
from relay_queue.models import Job, Worker
from tests import refusing
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, on_each_engine, on_postgresql

LEASES, JOBS = "relay_queue_lease", "relay_queue_job"


def run(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def reason() -> str:
    return Worker.objects.get(stopped_at=None).stop_reason


def assert_all_succeeded_at_once(farm: Farm, jobs: list[int]) -> None:
    farm.wait_finished()
    assert [farm.outcomes(job) for job in jobs] == [["acked"]] * len(jobs)
    assert [len(farm.runs(job)) for job in jobs] == [1] * len(jobs)


@on_each_engine
def test_a_table_that_refuses_leases_stops_claims_with_the_reason_until_it_takes_them(
    farm: Farm,
) -> None:
    workers = farm.work()
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    with refusing.refusing("INSERT", LEASES):
        jobs = [farm.enqueue(chores.note) for _ in range(20)]
        wait_until(lambda: "cannot claim jobs" in reason())
        assert "not this one" in reason()
        doctor = farm.manage("relay", "doctor", check=False)
        assert (doctor.returncode, "cannot claim jobs" in doctor.stdout) == (1, True)
        assert "hindered: cannot claim" in farm.manage("relay", "status").stdout
        assert set(Job.objects.filter(pk__in=jobs).values_list("state", flat=True)) == {"ready"}
    assert_all_succeeded_at_once(farm, jobs)
    wait_until(lambda: reason() == "")
    assert workers.poll() is None
    assert farm.log(workers).count("Cannot claim jobs") == 1


@on_each_engine
def test_an_outcome_that_a_table_refuses_is_kept_until_it_takes_it(farm: Farm) -> None:
    workers = farm.work(concurrency=2)
    held = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(held, word="began")
    with refusing.refusing("UPDATE", LEASES):
        farm.make("go")
        wait_until(lambda: "cannot store outcomes" in reason())
        later = farm.enqueue(chores.note)
        wait_until(lambda: farm.log(workers).count("Cannot store outcomes") == 1)
        assert farm.job(later).state == "ready", "what cannot be ended is not begun"
    farm.wait_finished()
    assert [farm.outcomes(job) for job in (held, later)] == [["acked"]] * 2
    assert len(farm.runs(held, word="ended")) == 1
    wait_until(lambda: reason() == "")


@on_each_engine
def test_a_table_that_refuses_retries_alone_neither_charges_nor_condemns_a_failed_attempt(
    farm: Farm,
) -> None:
    farm.work()
    with refusing.refusing("UPDATE", JOBS, "new.state = 'retrying'"):
        job = farm.enqueue(chores.fail_times, 1)
        wait_until(lambda: "cannot store outcomes" in reason())
        assert (farm.job(job).state, farm.outcomes(job)) == ("running", [None])
    assert farm.wait_state(job, "succeeded").attempt == 2
    assert farm.outcomes(job) == ["failed", "acked"]


@on_each_engine
def test_what_is_refused_is_forgotten_once_there_is_nothing_left_of_it(farm: Farm) -> None:
    workers = farm.work()
    with refusing.refusing("UPDATE", JOBS, "old.state = 'scheduled' AND new.state = 'ready'"):
        due = timezone.now() + timedelta(seconds=0.5)
        job = farm.enqueue(chores.note, run_after=due)
        wait_until(lambda: "cannot wake jobs" in reason())
        farm.do(store.cancel, [job])
        wait_until(lambda: reason() == "")
        farm.wait_logged(workers, "Can wake jobs again")


@on_each_engine
def test_statistics_that_cannot_be_written_cost_no_job(farm: Farm) -> None:
    farm.work()
    with refusing.refusing("INSERT", "relay_queue_queueminute"):
        jobs = [farm.enqueue(chores.note) for _ in range(10)]
        assert_all_succeeded_at_once(farm, jobs)
        wait_until(lambda: farm.wait_state(farm.enqueue(chores.note), "succeeded").attempt == 1)


@on_each_engine
def test_a_table_that_is_away_for_a_while_condemns_nothing(farm: Farm) -> None:
    farm.relay["POLL_SECONDS"] = 0.5
    workers = farm.work()
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    run(f"ALTER TABLE {LEASES} RENAME TO elsewhere")
    try:
        jobs = [farm.enqueue(chores.note) for _ in range(10)]
        farm.wait_logged(workers, "Cannot read the tables")
    finally:
        run(f"ALTER TABLE elsewhere RENAME TO {LEASES}")
    assert_all_succeeded_at_once(farm, jobs)
    assert workers.poll() is None


@on_postgresql
def test_old_workers_serve_while_columns_change_their_types_and_are_added(farm: Farm) -> None:
    farm.relay["POLL_SECONDS"] = 0.5
    workers = farm.work()
    jobs = [farm.enqueue(chores.note)]
    farm.wait_finished()
    changes = [
        f"ALTER TABLE {JOBS} ALTER COLUMN queue TYPE varchar(120)",
        f"ALTER TABLE {JOBS} ALTER COLUMN idempotency_key TYPE varchar(300)",
        f"ALTER TABLE {JOBS} ALTER COLUMN queue TYPE text",
        f"ALTER TABLE {JOBS} ADD COLUMN added text NOT NULL DEFAULT ''",
        f"ALTER TABLE {LEASES} ADD COLUMN added text",
    ]
    back = [
        f"ALTER TABLE {LEASES} DROP COLUMN added",
        f"ALTER TABLE {JOBS} DROP COLUMN added",
        f"ALTER TABLE {JOBS} ALTER COLUMN queue TYPE varchar(100)",
        f"ALTER TABLE {JOBS} ALTER COLUMN idempotency_key TYPE varchar(255)",
    ]
    try:
        for change in changes:
            run(change)
            jobs += [farm.enqueue(chores.note) for _ in range(5)]
            farm.wait_finished()
    finally:
        for change in back:
            run(change)
            jobs.append(farm.enqueue(chores.note))
            farm.wait_finished()
    assert_all_succeeded_at_once(farm, jobs)
    assert workers.poll() is None
    assert reason() == ""
    assert "Cannot" not in farm.log(workers), "once more with a new connection is enough"


@on_each_engine
def test_old_workers_serve_while_a_column_is_added(farm: Farm) -> None:
    workers = farm.work()
    jobs = [farm.enqueue(chores.note)]
    farm.wait_finished()
    run(f"ALTER TABLE {JOBS} ADD COLUMN added text")
    try:
        jobs += [farm.enqueue(chores.note) for _ in range(5)]
        assert_all_succeeded_at_once(farm, jobs)
    finally:
        run(f"ALTER TABLE {JOBS} DROP COLUMN added")
    assert "Cannot" not in farm.log(workers)


@on_postgresql
def test_a_sequence_behind_its_table_is_named_by_doctor_and_costs_no_job(farm: Farm) -> None:
    """As after logical replication, which leaves sequences out."""
    workers = farm.work()
    for _ in range(3):
        farm.wait_state(farm.enqueue(chores.note), "succeeded")
    lease = "pg_get_serial_sequence('relay_queue_lease', 'id')"
    run(f"UPDATE {LEASES} SET id = id + 1000000")  # far ahead, so that no retry gets past it
    run("SELECT setval(" + lease + f", (SELECT min(id) - 1 FROM {LEASES}))")
    jobs = [farm.enqueue(chores.note) for _ in range(2)]
    wait_until(lambda: "Cannot claim jobs" in farm.log(workers) or jobs_done(farm, jobs))
    run("SELECT setval(" + lease + ", 1)")
    doctor = farm.manage("relay", "doctor", check=False)
    assert "sequence of relay_queue_lease" in doctor.stdout
    assert "sqlsequencereset" in doctor.stdout
    mended = farm.manage("sqlsequencereset", "relay_queue").stdout
    run(mended.replace("\x1b[1m", ""))
    assert_all_succeeded_at_once(farm, jobs)
    assert "sequence of" not in farm.manage("relay", "doctor", check=False).stdout


def jobs_done(farm: Farm, jobs: list[int]) -> bool:
    return all(farm.job(job).state == "succeeded" for job in jobs)


@on_each_engine
@pytest.mark.parametrize(
    "incarnation",
    [
        pytest.param("no hex at all", marks=pytest.mark.thorough),
        "../../etc/passwd",
        pytest.param("a" * 31, marks=pytest.mark.thorough),
    ],
)
def test_an_altered_worker_row_stops_neither_workers_nor_commands(
    farm: Farm, incarnation: str
) -> None:
    Worker.objects.create(
        incarnation=incarnation,
        name="altered",
        host="h",
        boot_id="b",
        pid=1,
        lock_device=1,
        lock_inode=1,
        session_lock=True,
        queues="",
        concurrency=1,
        started_at="2026-01-01T00:00:00Z",
        heartbeat_at="2026-01-01T00:00:00Z",
    )
    farm.spawn(*farm.command(4, 1, None))
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    assert "altered" in farm.manage("relay", "doctor", check=False).stdout
    farm.manage("relay", "recover")
    verify = farm.manage("relay", "verify", check=False)
    assert (verify.returncode, "32 hexadecimal digits" in verify.stdout) == (1, True)
    Worker.objects.filter(incarnation=incarnation).delete()
