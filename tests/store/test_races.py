"""Races between real processes on one file: keys, capacity, leases and waiting producers."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import Counter
from typing import Any

import pytest

from relay_queue import store
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job, Lease
from tests.conftest import Project, wait_until
from tests.store.actions import (
    ack,
    assert_counters_exact,
    claim_one,
    connection,
    do,
    enqueue,
    enqueue_each,
    job,
    rows,
    state,
)

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.slow]

# Each process says that it is ready, waits until its input ends, and then prints what it did as
# one line of JSON. So all of them meet on the file, however slowly each one started.
PRELUDE = """
import json, sys
from relay_queue import store
from relay_queue.exceptions import QueueFull
from relay_queue.store import inspect
from django.db import connection

def job(**options):
    return store.prepare(task="tests.tasks.anything", **options)

inspect.look()
print("ready", flush=True)
sys.stdin.read()
"""

ENQUEUE_ONE_KEY = """
with store.transaction() as tx:
    answer = store.enqueue(tx, job(idempotency_key="the one", args=[1]))
print(json.dumps([answer.job_id, answer.created]))
"""

FILL = """
admitted, refused = [], 0
for n in range(50):
    try:
        with store.transaction() as tx:
            admitted.append(store.enqueue(tx, job(queue="tight")).job_id)
    except QueueFull:
        refused += 1
print(json.dumps([admitted, refused]))
"""

FILL_IN_BATCHES = """
admitted, refused = [], 0
for n in range(20):
    try:
        with store.transaction() as tx:
            batch = store.enqueue_many(tx, [job(queue="tight")] * 3)
        admitted += [answer.job_id for answer in batch]
    except QueueFull:
        refused += 1
print(json.dumps([admitted, refused]))
"""

CLAIM_ALL = """
taken = []
while True:
    with store.transaction() as tx:
        claims = store.claim(tx, worker_id=None, queues=["default"], limit=3)
    if not claims:
        break
    taken += [[c.job_id, c.lease_id, c.token] for c in claims]
print(json.dumps(taken))
"""

CHURN = """
done = 0
for n in range(30):
    try:
        with store.transaction() as tx:
            store.enqueue(tx, job(queue="tight"))
    except QueueFull:
        pass
    with store.transaction() as tx:
        claims = store.claim(tx, worker_id=None, queues=["tight"], limit=2)
    with store.transaction() as tx:
        for c in claims:
            done += store.ack(tx, c.lease_id, c.token).state == "succeeded"
    with store.transaction() as tx:
        for c in claims:
            store.ack(tx, c.lease_id, c.token)
print(json.dumps(done))
"""

ACK_ONE = """
lease_id, token = int(sys.argv[1]), sys.argv[2]
with store.transaction() as tx:
    answer = store.settle(tx, [store.Settlement(sys.argv[3], lease_id, token)])[0]
print(json.dumps([answer.state, answer.accepted]))
"""


def run_together(project: Project, sources: list[str], *arguments: list[str]) -> list[Any]:
    """Run sources in processes of their own at the same time; return what each printed."""
    processes = [
        project.spawn_python(PRELUDE + source, *extra, stdin=subprocess.PIPE)
        for source, extra in zip(sources, arguments or [[]] * len(sources), strict=True)
    ]
    wait_until(
        lambda: all("ready" in project.log(process) for process in processes),
        timeout=60,
        message=lambda: "\n".join(project.log(process) for process in processes),
    )
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        assert process.wait(60) == 0, project.log(process)
    return [json.loads(project.log(process).splitlines()[-1]) for process in processes]


def test_sixteen_processes_with_one_key_make_one_job(shared_project: Project) -> None:
    answers = run_together(shared_project, [ENQUEUE_ONE_KEY] * 16)
    assert len({job_id for job_id, _ in answers}) == 1
    assert sum(created for _, created in answers) == 1
    assert rows(Job).count() == 1
    assert_counters_exact()


@pytest.mark.parametrize("source", [FILL, FILL_IN_BATCHES], ids=["single", "batches"])
def test_racing_producers_never_exceed_a_capacity(source: str, shared_project: Project) -> None:
    do(store.set_limits, "tight", capacity=37, max_running=None)
    answers = run_together(shared_project, [source] * 8)
    admitted = [job_id for ids, _ in answers for job_id in ids]
    fits = 37 if source is FILL else 36
    assert len(admitted) == len(set(admitted)) == fits
    assert set(rows(Job).values_list("id", flat=True)) == set(admitted)
    tries, size = (50, 1) if source is FILL else (20, 3)
    assert sum(refused for _, refused in answers) == 8 * tries - fits // size
    assert_counters_exact()


def test_racing_claims_give_each_job_exactly_once(shared_project: Project) -> None:
    ids = [a.job_id for a in do(store.enqueue_many, [job() for _ in range(300)])]
    taken = [claim for claims in run_together(shared_project, [CLAIM_ALL] * 6) for claim in claims]
    assert sorted(job_id for job_id, _, _ in taken) == ids
    assert len({lease_id for _, lease_id, _ in taken}) == 300
    assert len({token for _, _, token in taken}) == 300
    assert Counter(rows(Lease).values_list("job_id", flat=True)) == Counter(ids)
    assert_counters_exact()


def test_racing_owners_give_room_back_exactly_once(shared_project: Project) -> None:
    do(store.set_limits, "tight", capacity=5, max_running=3)
    done = sum(run_together(shared_project, [CHURN] * 6))
    assert done == rows(Job).filter(state="succeeded").count() > 0
    assert not rows(Lease).filter(ended_at=None).exists()
    assert_counters_exact()
    left = rows(Job).exclude(state="succeeded").count()
    for _ in range(5 - left):
        enqueue(queue="tight")
    with pytest.raises(QueueFull):
        enqueue(queue="tight")


def test_racing_words_on_one_lease_let_one_of_them_stand(shared_project: Project) -> None:
    job_id = enqueue()
    held = claim_one()
    words = ["ack", "nack", "release", "snooze"] * 2
    arguments = [[str(held.lease_id), held.token, word] for word in words]
    answers = run_together(shared_project, [ACK_ONE] * 8, *arguments)
    final = state(job_id)
    accepted = [word for word, (_, stands) in zip(words, answers, strict=True) if stands]
    # An ack that is told twice is answered as the success that it was.
    assert accepted in (["ack", "ack"], ["nack"], ["release"], ["snooze"])
    wanted = {"ack": "succeeded", "nack": "retrying", "release": "ready", "snooze": "scheduled"}
    assert final == wanted[accepted[0]]
    assert_counters_exact()


def test_threads_of_one_process_share_the_jobs_too() -> None:
    ids = enqueue_each(40)
    taken: list[int] = []
    failures: list[BaseException] = []

    def take() -> None:
        try:
            while True:
                with store.transaction() as tx:
                    claims = store.claim(tx, worker_id=None, queues=["default"], limit=2)
                if not claims:
                    return
                taken.extend(c.job_id for c in claims)
        except BaseException as failure:
            failures.append(failure)
        finally:
            connection().close()

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert sorted(taken) == ids
    assert_counters_exact()


def test_a_waiting_producer_is_admitted_when_room_appears() -> None:
    do(store.set_limits, "default", capacity=1, max_running=None)
    enqueue()
    held = claim_one()
    waiting, admitted = threading.Event(), []

    def produce() -> None:
        try:
            waiting.set()
            admitted.append(store.enqueue_waiting(job(args=["late"]), 60))
        finally:
            connection().close()

    producer = threading.Thread(target=produce)
    producer.start()
    assert waiting.wait(10)
    assert rows(Job).count() == 1
    ack(held)
    producer.join(60)
    (answer,) = admitted
    assert (answer.created, state(answer.job_id)) == (True, "ready")
    assert_counters_exact()


def test_of_many_waiting_producers_one_is_admitted_per_place(shared_project: Project) -> None:
    do(store.set_limits, "default", capacity=1, max_running=None)
    enqueue()
    source = """
try:
    print(json.dumps(store.enqueue_waiting(job(), 3).job_id))
except QueueFull:
    print("null")
"""
    held = claim_one()
    acker = threading.Timer(0.5, lambda: (ack(held), connection().close()))
    acker.start()
    answers = run_together(shared_project, [source] * 4)
    acker.join(10)
    assert len([a for a in answers if a is not None]) == 1
    assert_counters_exact()
