"""A row that was altered on disk costs one job: not the worker, nor the jobs behind it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from relay_queue import clock, store
from relay_queue.models import Job, Lease
from relay_queue.worker.identity import register
from relay_queue.worker.loop import Loop
from relay_queue.worker.options import WorkerOptions
from relay_queue.worker.waiting import Waiting
from tests import tasks

pytestmark = pytest.mark.django_db(transaction=True)

OPTIONS: dict[str, Any] = {
    "name": "w",
    "queues": ("default",),
    "exclude_queues": (),
    "backend": None,
    "concurrency": 4,
    "lease_seconds": None,
    "shutdown_timeout_seconds": 60.0,
    "drain": True,
    "max_jobs": None,
}

NOT_TEXT = "CAST(x'7bff7d' AS TEXT)"


@pytest.fixture
def drain() -> Iterator[Callable[[], int]]:
    """Return a function that runs a loop in this thread until nothing is left to do."""
    ours, theirs = socket.socketpair()

    def run() -> int:
        identity = register(WorkerOptions(**OPTIONS))
        loop = Loop(WorkerOptions(**OPTIONS), identity, Waiting(theirs.fileno()))
        try:
            return loop.run()
        finally:
            identity.retire()

    yield run
    ours.close()
    theirs.close()
    connection.close()  # the loop may have told it to read anything


def alter(job_id: int, change: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA ignore_check_constraints = ON")
        cursor.execute(f"UPDATE relay_queue_job SET {change} WHERE id = %s", [job_id])
        cursor.execute("PRAGMA ignore_check_constraints = OFF")


def state(job_id: int) -> str:
    return Job.objects.values_list("state", flat=True).get(pk=job_id)


@pytest.mark.parametrize(
    "change",
    [
        f"payload = {NOT_TEXT}",
        f"task = {NOT_TEXT}",
        "payload = '{}'",
        "checksum = 'x'",
        "lease_seconds = 'x'",
        "lease_seconds = 9e999",
        "timeout_seconds = 'x'",
        "created_at = 'x'",
        "available_at = 'x'",
        "attempt = attempt_base + max_attempts",
    ],
)
def test_an_altered_ready_job_goes_dead_and_its_neighbours_run(
    change: str, drain: Callable[[], int]
) -> None:
    before, altered, after = (int(tasks.noop.enqueue().id) for _ in range(3))
    alter(altered, change)
    assert drain() == 0
    assert state(altered) == "dead"
    assert (state(before), state(after)) == ("succeeded", "succeeded")
    assert not Lease.objects.filter(ended_at=None).exists()


def test_a_ready_job_whose_losses_are_no_number_runs_as_a_suspect(
    drain: Callable[[], int],
) -> None:
    altered, after = (int(tasks.noop.enqueue().id) for _ in range(2))
    alter(altered, "losses = 'x'")
    assert drain() == 0
    assert (state(altered), state(after)) == ("succeeded", "succeeded")


@pytest.mark.parametrize(
    "change", ["backoff_base_seconds = -1", "backoff_jitter = 'x'", "attempt = 'x'", "rank = 'x'"]
)
def test_an_altered_running_job_does_not_stop_the_recovery_of_others(
    change: str, drain: Callable[[], int]
) -> None:
    then = clock.now() - timedelta(hours=1)
    with clock.use(lambda: then):
        altered, other = (int(tasks.noop.enqueue().id) for _ in range(2))
        with store.transaction() as tx:
            assert len(store.claim(tx, worker_id=None, queues=["default"], limit=2)) == 2
    alter(altered, change)
    assert drain() == 0
    assert state(altered) in {"dead", "succeeded"}
    assert state(other) == "succeeded"


def test_a_hook_of_a_commit_runs_with_the_gate_open() -> None:
    from django.db import transaction

    from relay_queue.db.gate import gate_of

    gate = gate_of(connection)
    assert gate is not None
    held: list[bool] = []
    with store.transaction(wait_seconds=5, first=True):
        transaction.on_commit(lambda: held.append(gate.held_by_this_thread()))
        assert gate.held_by_this_thread()
    assert held == [False]
