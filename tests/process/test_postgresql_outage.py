"""Workers on PostgreSQL while their server stops, crashes and starts again."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Literal

import pytest
from django.db import connection

from relay_queue import store
from relay_queue.models import Job, Lease
from tests import postgresql
from tests.conftest import DATABASE_VARIABLE, STOP_SECONDS, wait_until
from tests.process import chores
from tests.process.farm import Farm, is_alive, on_postgresql
from tests.process.test_kill_rounds import JOBS, assert_ledger_explains_all, enqueue_mixture

pytestmark = on_postgresql

MODES: tuple[Literal["fast", "immediate"], ...] = ("immediate", "fast", "immediate")
"""How the server ends, one after the other; ``immediate`` is a crash."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[postgresql.Server]:
    """Return a server, stopped, with a migrated template, that nobody else uses."""
    folder = postgresql.make_folder()
    server = postgresql.Server(folder / "server")
    server.folder.mkdir()
    server.start()
    server.migrate()
    server.stop()
    yield server
    shutil.rmtree(folder)


@pytest.fixture
def fragile_server(cluster: postgresql.Server) -> Iterator[postgresql.Server]:
    """Return a server that may be stopped, for the length of a test."""
    cluster.start()
    yield cluster
    cluster.stop("immediate")


@pytest.fixture
def postgresql_url(fragile_server: postgresql.Server) -> str:
    """Return the address of a database on that server; it goes with the server."""
    return fragile_server.create(f"test_{uuid.uuid4().hex}")


def test_a_worker_that_is_replaced_while_the_server_is_away_waits_as_long_as_it_takes(
    farm: Farm, fragile_server: postgresql.Server
) -> None:
    farm.relay |= {"READY_TIMEOUT_SECONDS": 1, "POLL_SECONDS": 1}
    supervisor = farm.work(processes=2)
    victim = farm.workers()[0]
    connection.close()
    fragile_server.stop("fast")
    os.kill(victim, signal.SIGKILL)
    farm.wait_logged(supervisor, "by SIGKILL")
    # Its second word comes ten seconds later: ten times as long as a start may take.
    farm.wait_logged(supervisor, "s so far")
    fragile_server.start()
    reconnect()
    jobs = [farm.enqueue(chores.wait, farm.file("go")) for _ in range(8)]  # all slots of both
    for job in jobs:
        farm.wait_runs(job)
    farm.make("go")
    farm.wait_finished()
    said = farm.log(supervisor)
    assert said.count("starting another") == 1, "only the one that was killed was replaced"
    assert "The database is reached after" in said


def test_runworker_waits_for_a_server_that_is_started_later(
    farm: Farm, fragile_server: postgresql.Server
) -> None:
    job = farm.enqueue(chores.note)
    connection.close()
    fragile_server.stop("fast")
    supervisor = farm.spawn(*farm.command())
    told_to_stop = farm.spawn(*farm.command())
    for process in (supervisor, told_to_stop):
        wait_until(
            lambda process=process: "The database is not reached; waiting" in farm.log(process),
            message=lambda process=process: farm.log(process),
        )
    told_to_stop.terminate()
    assert told_to_stop.wait(STOP_SECONDS) == 128 + signal.SIGTERM
    fragile_server.start()
    reconnect()
    farm.wait_state(job, "succeeded")


@pytest.mark.parametrize("wrong", ["name", "role"])
def test_runworker_does_not_wait_for_what_the_server_refuses(
    farm: Farm, fragile_server: postgresql.Server, wrong: str
) -> None:
    part, other = (r"/test_\w+\?", "/nowhere?") if wrong == "name" else (r"//\w+@", "//nobody@")
    address = re.sub(part, other, str(farm.database))
    assert address != farm.database
    process = farm.spawn(*farm.command(), env={DATABASE_VARIABLE: address})
    assert process.wait(STOP_SECONDS) == 1
    said = farm.log(process)
    assert "does not exist" in said
    assert "waiting" not in said
    assert "migrate" not in said, "the tables are not what is missing"


def reconnect() -> None:
    """Let the test's own connection find the server again."""
    connection.close()
    connection.ensure_connection()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_workers_outlive_a_restart_and_keep_what_ran_meanwhile(
    farm: Farm, fragile_server: postgresql.Server, mode: Literal["fast", "immediate"]
) -> None:
    workers = farm.work(processes=2)
    pids = farm.workers()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    fragile_server.stop(mode)
    farm.make("go")
    farm.wait_runs(job, word="ended")
    time.sleep(1)  # some attempts to reach it
    fragile_server.start()
    reconnect()
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert farm.outcomes(job) == ["acked"]
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    assert farm.workers() == pids, "nobody was judged, and nobody gave up"
    assert all(map(is_alive, pids))
    assert workers.poll() is None


@pytest.mark.slow
def test_every_job_ends_once_while_the_server_crashes_under_load(
    farm: Farm, fragile_server: postgresql.Server
) -> None:
    dice = random.Random("crashes")
    supervisor = farm.spawn(*farm.command(processes=2, concurrency=4))
    for mode in MODES:
        done = finished()
        enqueue_mixture(farm, dice)
        wait_until(lambda: finished() > done + 5, message=farm.everything)  # noqa: B023 - called here
        fragile_server.restart(mode)
        reconnect()
    farm.wait_finished(90)
    assert farm.stop(supervisor) == 0, farm.log(supervisor)
    assert_ledger_explains_all(farm, len(MODES) * JOBS)
    answer = farm.manage("relay", "verify", check=False)
    assert answer.returncode == 0, answer.stdout
    taken = Lease.objects.filter(outcome__in=["lost", "expired"])
    assert not taken.exists(), farm.log(supervisor)  # nobody died


def finished() -> int:
    """Count the jobs that have ended."""
    return Job.objects.exclude(finished_at=None).count()


def test_a_function_is_told_that_its_time_is_over_while_the_server_is_away(
    farm: Farm, fragile_server: postgresql.Server
) -> None:
    farm.work()
    job = farm.enqueue(chores.heed, timeout_seconds=2)
    farm.wait_runs(job, word="began")
    lost = farm.enqueue(chores.wait_politely, farm.file("never"), lease_seconds=3)
    farm.wait_runs(lost, word="began")
    fragile_server.stop("immediate")
    farm.wait_runs(lost, word="told")
    fragile_server.start()
    reconnect()
    wait_until(lambda: farm.outcomes(job)[0] == "timed_out", message=lambda: farm.story(job))
    # What it then says is taken if nobody has ended its lease meanwhile, and else refused.
    wait_until(
        lambda: farm.outcomes(lost)[0] == "acked" or farm.leases(lost)[0].refused_at,
        message=lambda: farm.story(lost),
    )
    farm.do(store.cancel, [job, lost])


def test_workers_can_be_told_to_stop_while_the_server_is_away(
    farm: Farm, fragile_server: postgresql.Server
) -> None:
    workers = farm.work()
    fragile_server.stop("fast")
    workers.terminate()
    code = workers.wait(60)
    fragile_server.start()
    reconnect()
    assert code == 0, farm.log(workers)
