"""Workers on PostgreSQL: their sessions, and hosts of which one dies or is cut off."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from psycopg.conninfo import conninfo_to_dict

from relay_queue import store
from relay_queue.models import Worker
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, is_alive, on_postgresql
from tests.process.forwarder import Forwarder

pytestmark = on_postgresql

SESSION = "relay worker session"


def backends(condition: str) -> list[int]:
    """Return the server's processes for the test database that meet a condition, oldest first."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend' "  # the server's own come when they like
            f"AND pid <> pg_backend_pid() AND {condition} ORDER BY backend_start"
        )
        return [row[0] for row in cursor.fetchall()]


def sessions() -> list[int]:
    return backends(f"application_name = '{SESSION}'")


def end(pids: list[int]) -> None:
    """End connections as an administrator does, or a firewall."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s) pid", [pids])


# --- the session ---------------------------------------------------------------------------


def test_a_worker_has_one_session_and_its_lock_beside_the_loops_connection(farm: Farm) -> None:
    farm.work()
    (session,) = sessions()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_locks JOIN pg_database d ON d.oid = database "
            "WHERE locktype = 'advisory' AND objsubid = 1 AND datname = current_database()"
        )
        assert cursor.fetchall() == [(session,)]
    assert Worker.objects.get().session_lock
    assert len(backends("TRUE")) == 2


def test_a_session_that_was_ended_is_opened_again_and_its_worker_goes_on(farm: Farm) -> None:
    farm.work()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    old = sessions()
    end(old)
    wait_until(lambda: sessions() not in ([], old))
    farm.make("go")
    assert farm.wait_state(job, "succeeded").attempt == 1
    # Only the new session hears of this.
    farm.wait_state(farm.enqueue(chores.note), "succeeded")


def test_connections_of_a_worker_that_were_all_ended_cost_no_outcome(farm: Farm) -> None:
    workers = farm.work()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    end(backends("TRUE"))
    farm.make("go")
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert (farm.outcomes(job), len(farm.runs(job))) == (["acked"], 2)
    assert workers.poll() is None


@pytest.mark.parametrize("what", ["settlements", "claims"])
def test_a_commit_of_unknown_outcome_is_told_again_and_what_it_claimed_handed_back(
    farm: Farm, what: str
) -> None:
    farm.drive("lose_commit", farm.file(what))
    pid = farm.worker()
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    farm.make(what)
    jobs = [farm.enqueue(chores.fail_times, 1), farm.enqueue(chores.note)]
    farm.wait_finished()
    wait_until(lambda: not os.path.exists(farm.file(what)))
    assert is_alive(pid), "the process goes on"
    failing, plain = ([o for o in farm.outcomes(job) if o != "unrun"] for job in jobs)
    assert (failing, plain) == (["failed", "acked"], ["acked"])
    assert [farm.job(job).attempt for job in jobs] == [2, 1]
    assert [len(farm.runs(job)) for job in jobs] == [2, 1]
    refused = [lease for job in jobs for lease in farm.leases(job) if lease.refused_at]
    assert not refused, "a repetition is no late return"


def test_with_polling_nobody_listens_and_only_expiry_tells_that_a_worker_died(farm: Farm) -> None:
    farm.relay |= {"WAKEUP": "poll", "POLL_SECONDS": 0.5}
    workers = farm.work(lease=2)
    assert (sessions(), Worker.objects.get().session_lock) == ([], False)
    job = farm.enqueue(chores.wait_first_time, farm.file("never"))
    farm.wait_runs(job)
    os.killpg(workers.pid, signal.SIGKILL)
    workers.wait()
    farm.work()
    farm.wait_state(job, "succeeded")
    assert farm.outcomes(job) == ["expired", "acked"]


def test_the_commands_tell_the_living_from_the_dead_and_recover_without_workers(farm: Farm) -> None:
    workers = farm.work()
    job = farm.enqueue(chores.wait_first_time, farm.file("never"))
    farm.wait_runs(job)
    assert "alive, heartbeat" in farm.manage("relay", "doctor", check=False).stdout
    os.killpg(workers.pid, signal.SIGKILL)
    workers.wait()
    wait_until(lambda: "dead, heartbeat" in farm.manage("relay", "doctor", check=False).stdout)
    farm.manage("relay", "recover")
    assert (farm.job(job).state, farm.outcomes(job)) == ("ready", ["lost"])


# --- two hosts -------------------------------------------------------------------------------


@pytest.fixture
def forwarder(farm: Farm) -> Iterator[Forwarder]:
    """Return the network between the far host and the server."""
    named = conninfo_to_dict(str(farm.database))

    def connect() -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{named['host']}/.s.PGSQL.{named['port']}")
        return server

    forwarder = Forwarder(connect)
    yield forwarder
    forwarder.close()


@pytest.fixture
def far(farm: Farm, forwarder: Forwarder, tmp_path: Path) -> Iterator[Farm]:
    """Return a farm on another host, which reaches the database through a network of its own."""
    named = conninfo_to_dict(str(farm.database))
    address = f"postgresql://{named['user']}@/{named['dbname']}"
    far = Farm(f"{address}?host=127.0.0.1&port={forwarder.port}", tmp_path / "far")
    yield far
    far.close()


def work_far(far: Farm, *arguments: str) -> int:
    """Start a worker on the far host; return its process id."""
    far.drive("live_elsewhere", "far", *arguments)
    return int(Worker.objects.get(host="far", stopped_at=None).pid)


def far_job(farm: Farm, **options: Any) -> int:
    """Enqueue a job that waits in its first attempt, and let the far host begin it."""
    job = farm.enqueue(chores.wait_first_time, farm.file("go"), **options)
    farm.wait_runs(job, word="began")
    return job


def test_the_jobs_of_a_worker_that_dies_on_another_host_are_freed_at_once(
    farm: Farm, far: Farm
) -> None:
    pid = work_far(far)
    job = far_job(farm)
    farm.work()
    boots = set(Worker.objects.values_list("boot_id", flat=True))
    assert len(boots) == 2, "to all appearances there are two machines"
    far_supervisor = os.getpgid(pid)
    os.killpg(far_supervisor, signal.SIGKILL)
    # The lease had a minute to go.
    assert farm.wait_state(job, "succeeded").attempt == 2
    assert farm.outcomes(job) == ["lost", "acked"]
    dead = Worker.objects.get(host="far")
    wait_until(lambda: Worker.objects.get(pk=dead.pk).stopped_at)


def test_a_host_that_is_cut_off_is_fenced_by_expiry_and_comes_back(
    farm: Farm, far: Farm, forwarder: Forwarder
) -> None:
    pid = work_far(far, "--lease-seconds=2")
    job = far_job(farm)
    farm.work()
    with forwarder.stalled():
        assert farm.wait_state(job, "succeeded").attempt == 2
        assert farm.outcomes(job) == ["expired", "acked"], "its lock was held all the time"
        before = farm.job(job)
        farm.make("go")
        wait_until(lambda: len(farm.runs(job, "ended")) == 2)
    farm.do(store.pause, "default")
    late = farm.wait_refused(farm.leases(job)[0].id)
    assert (late.refused_verb, late.outcome) == ("ack", "expired")
    assert farm.job(job).result == before.result
    assert is_alive(pid), "the worker lived through it"
    there = farm.enqueue(chores.note, queue_name="far")
    farm.wait_state(there, "succeeded")


def test_a_host_whose_connections_are_cut_is_back_before_its_leases_end(
    farm: Farm, far: Farm, forwarder: Forwarder
) -> None:
    work_far(far)
    job = far_job(farm)
    for _ in range(3):
        forwarder.cut()
        wait_until(lambda: len(sessions()) == 1)
    farm.make("go")
    assert farm.wait_state(job, "succeeded").attempt == 1, farm.story(job) + far.everything()
    assert farm.outcomes(job) == ["acked"]
