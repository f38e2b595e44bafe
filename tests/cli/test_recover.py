"""Recover ends what is expired and what belonged to workers that are proven dead."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from relay_queue import clock
from tests.conftest import Project, wait_until
from tests.store import actions

Relay = Callable[..., Any]


@pytest.mark.django_db
def test_expired_lease_is_ended_and_shown(relay: Relay) -> None:
    job_id = actions.enqueue()
    then = clock.now() - timedelta(hours=1)
    with clock.use(lambda: then):
        actions.enqueue()
        lost = actions.claim_one()
    answer = relay("recover", "--json")
    assert answer.code == 0
    (recovered,) = answer.data["recovered"]
    assert (recovered["job_id"], recovered["outcome"]) == (lost.job_id, "expired")
    assert actions.state(lost.job_id) == "ready"
    assert {job_id, lost.job_id} == {c.job_id for c in actions.claim(5)}


@pytest.mark.django_db
def test_nothing_to_do_is_said(relay: Relay) -> None:
    assert relay("recover").text == "Workers found dead: 0. Leases ended: 0.\n"


# A worker that holds a lease and then lives, or dies without a word.
WORKER = """
import os, sys, time
from relay_queue import conf, store
from relay_queue.db.filename import database_path
from relay_queue.worker.liveness import LivenessLock
from tests.store import actions
lock = LivenessLock.hold(database_path("default"), sys.argv[1] * 32)
worker_id = actions.register(
    incarnation=sys.argv[1] * 32, name=sys.argv[1], pid=os.getpid(),
    lock_device=lock.identity.device, lock_inode=lock.identity.inode)
actions.enqueue()
print("holds job", actions.claim_one(worker_id=worker_id).job_id, flush=True)
if sys.argv[2] == "die":
    os._exit(1)
time.sleep(600)
"""


def test_leases_of_dead_workers_are_ended_and_those_of_the_living_are_not(
    project: Project,
) -> None:
    project.python(WORKER, "d", "die", check=False)
    living = project.spawn_python(WORKER, "a", "live")
    wait_until(lambda: "holds job" in project.log(living))
    data = json.loads(project.manage("relay", "recover", "--json").stdout)
    assert [one["outcome"] for one in data["recovered"]] == ["lost"]
    assert len(data["dead_workers"]) == 1
    assert project.rows("SELECT state FROM relay_queue_job ORDER BY id") == [
        ("ready",),
        ("running",),
    ]
    stopped = dict(project.rows("SELECT name, stopped_at IS NOT NULL FROM relay_queue_worker"))
    assert stopped == {"d": 1, "a": 0}
    again = json.loads(project.manage("relay", "recover", "--json").stdout)
    assert again == {"dead_workers": [], "recounted_queues": [], "recovered": []}
    text = project.manage("relay", "doctor").stdout
    assert f"a (host, pid {living.pid}): alive" in text


@pytest.mark.django_db
def test_recount_sets_wrong_counters_to_what_the_jobs_are(relay: Relay) -> None:
    actions.enqueue()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE relay_queue_queuecount SET n = 7")
    answer = relay("recover", "--recount", "--json")
    assert answer.data["recounted_queues"] == ["default"]
    actions.assert_counters_exact()
