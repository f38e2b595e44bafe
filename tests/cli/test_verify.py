"""The verb verify: exit code, what it prints, and that it may run beside workers."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from relay_queue import store
from relay_queue.cli import upkeep
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
    assert "1 fault in 1 job." in answer.text
    (fault,) = relay("verify", "--json").data["faults"]
    assert (fault["kind"], fault["job_id"]) == ("checksum", job_id)
    assert fault["advice"]


ANOTHER_LEASE = (
    "INSERT INTO relay_queue_lease (job_id, attempt, token, acquired_at, expires_at, error,"
    " traceback, refused_verb, refused_reason) SELECT job_id, attempt + 1, 'x', acquired_at,"
    " expires_at, '', '', '', '' FROM relay_queue_lease"
)
REOPEN = (
    "UPDATE relay_queue_lease SET ended_at = NULL, outcome = NULL,"
    " expires_at = '2020-01-01 00:00:00' WHERE id = (SELECT min(id) FROM relay_queue_lease)"
)
END_LATER_ONE = (
    "UPDATE relay_queue_lease SET ended_at = expires_at, outcome = 'failed'"
    " WHERE id > (SELECT min(id) FROM relay_queue_lease)"
)

# How a fault is planted in a job with one failed and one open lease, whether it names the job and a
# lease, and the verbs that put it right by its advice.
PLANTED: dict[str, tuple[list[str], bool, bool, list[str]]] = {
    "checksum": (["UPDATE relay_queue_job SET payload = payload || ' '"], True, False, []),
    "missing_lease": (
        ["DELETE FROM relay_queue_lease WHERE outcome IS NULL"],
        True,
        False,
        ["cancel {job}", "requeue {job}"],
    ),
    "two_open_leases": (
        ["DROP INDEX relay_lease_one_open", ANOTHER_LEASE],
        True,
        True,
        ["cancel {job}", "requeue {job}"],
    ),
    "overlapping_leases": (
        ["DROP INDEX relay_lease_one_open", REOPEN, END_LATER_ONE],
        True,
        True,
        ["recover"],
    ),
    "stray_lease": (
        [END_LATER_ONE, REOPEN, "UPDATE relay_queue_job SET state = 'dead'"],
        True,
        True,
        ["recover"],
    ),
    "counter": (
        ["UPDATE relay_queue_queuecount SET n = n + 3"],
        False,
        False,
        ["recover --recount"],
    ),
    "budget": (["UPDATE relay_queue_job SET max_attempts = 1"], True, False, []),
    "unknown_state": (["UPDATE relay_queue_job SET state = 'limbo'"], True, False, []),
    "attempt": (["UPDATE relay_queue_job SET attempt = 1"], True, False, []),
    "attempt_order": (["UPDATE relay_queue_lease SET attempt = 1"], True, True, []),
    "lease_outcome": (["UPDATE relay_queue_lease SET outcome = 'lost'"], True, True, []),
    "acked_late": (
        ["UPDATE relay_queue_lease SET outcome = 'acked', expires_at = '2020-01-01 00:00:00'"],
        True,
        True,
        [],
    ),
}


@pytest.fixture
def job_id() -> int:
    """Return a job at its second attempt: one lease failed, the other is open."""
    job_id = actions.enqueue()
    actions.nack(actions.claim_one(), delay_seconds=0.0)
    actions.do(store.promote)
    actions.claim_one()
    return job_id


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Let rows be written that the constraints of the tables forbid."""
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA ignore_check_constraints = ON")
        yield
        cursor.execute("PRAGMA ignore_check_constraints = OFF")


@pytest.mark.django_db
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_named_with_its_ids_and_a_way_out_that_works(
    relay: Relay, job_id: int, kind: str
) -> None:
    statements, names_job, names_lease, way_out = PLANTED[kind]
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
    found = {fault["kind"]: fault for fault in relay("verify", "--json").data["faults"]}
    fault, text = found[kind], relay("verify").text
    assert (fault["job_id"] == job_id, fault["lease_id"] is not None) == (names_job, names_lease)
    if names_job:
        assert f"job {job_id} " in fault["message"]
    if names_lease:
        assert re.search(rf"leases?.*\b{fault['lease_id']}\b", fault["message"])
    assert fault["message"] in text
    assert f"What to do: {fault['advice']}" in " ".join(text.split())
    for step in way_out:
        assert f"relay {step.partition(' {')[0]}" in fault["advice"]
        assert relay(*step.format(job=job_id).split()).code == 0
    if way_out:
        assert kind not in {left["kind"] for left in relay("verify", "--json").data["faults"]}


@pytest.mark.django_db
def test_many_faults_of_a_kind_are_cut_in_text(relay: Relay) -> None:
    actions.enqueue_each(upkeep.SHOWN + 2)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE relay_queue_job SET checksum = 0")
    assert "and 2 more" in relay("verify").text


CHURN = """
import random, sys, time
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
    time.sleep(0.005)  # busy, but not so fast that there is ever more to verify
"""


def test_verify_and_inspect_beside_a_busy_writer_find_no_fault(project: Project) -> None:
    writer = project.spawn_python(CHURN)
    wait_until(lambda: "started" in project.log(writer))
    wait_until(lambda: project.rows("SELECT count(*) FROM relay_queue_lease")[0][0] > 200)
    for _ in range(2):
        answer = project.manage("relay", "verify", check=False)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    assert project.manage("relay", "inspect").returncode == 0
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
