"""The verb verify: exit code, what it prints, and that it may run beside workers."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from relay_queue.cli import verify as verb
from tests.conftest import Project, wait_until
from tests.store import actions

Relay = Callable[..., Any]


@pytest.mark.django_db
def test_sound_queue_exits_with_0(relay: Relay) -> None:
    actions.enqueue_each(3)
    answer = relay("verify")
    assert answer.code == 0
    assert "No fault in 3 jobs." in answer.text
    data = relay("verify", "--json").data
    assert (data["ok"], data["jobs"], data["faults"]) == (True, 3, [])


@pytest.mark.django_db
def test_fault_is_named_with_the_way_out_and_exits_with_1(relay: Relay) -> None:
    job_id = actions.enqueue()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE relay_queue_job SET payload = '{}'")
    answer = relay("verify")
    assert answer.code == 1
    assert f"job {job_id} is not the one that was enqueued" in answer.text
    assert "What to do: A worker never runs this job" in answer.text
    (fault,) = relay("verify", "--json").data["faults"]
    assert (fault["kind"], fault["job_id"]) == ("checksum", job_id)
    assert fault["advice"]


@pytest.mark.django_db
def test_many_faults_of_a_kind_are_cut_in_text(relay: Relay) -> None:
    actions.enqueue_each(verb.SHOWN_PER_KIND + 2)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE relay_queue_job SET checksum = 0")
    assert "and 2 more" in relay("verify").text


CHURN = """
import random, sys
from tests.store import actions
from relay_queue import store
print("started", flush=True)
held = []
while True:
    with store.transaction() as tx:
        store.enqueue_many(tx, [actions.job(args=[n]) for n in range(20)])
        claims = store.claim(tx, worker_id=None, queues=["default"], limit=20)
        held += claims
    with store.transaction() as tx:
        for held_one in held[:-5]:
            if random.random() < 0.7:
                store.ack(tx, held_one.lease_id, held_one.token, "1")
            else:
                store.nack(tx, held_one.lease_id, held_one.token, delay_seconds=0.0)
        held = held[-5:]
        store.promote(tx)
"""


def test_verify_beside_a_busy_writer_finds_no_fault(project: Project) -> None:
    writer = project.spawn_python(CHURN)
    wait_until(lambda: "started" in project.log(writer))
    wait_until(lambda: project.rows("SELECT count(*) FROM relay_queue_lease")[0][0] > 200)
    for _ in range(2):
        answer = project.manage("relay", "verify", check=False)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    assert writer.poll() is None, project.log(writer)


def test_torn_log_exits_with_1_before_anything_repairs_it(project: Project) -> None:
    project.python("import os\nfrom tests.store import actions\nactions.enqueue()\nos._exit(0)")
    log = project.database.with_name(project.database.name + "-wal")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 10)
    answer = project.manage("relay", "verify", check=False)
    assert answer.returncode == 1
    assert "log_torn" in answer.stdout
    assert "SQLite drops it" in answer.stdout
