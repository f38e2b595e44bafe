"""Races between real processes on one file: keys, capacity, leases and waiting producers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relay_queue import store
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job, Lease, Queue
from tests.store.actions import (
    ack,
    assert_counters_exact,
    claim,
    claim_one,
    connection,
    do,
    enqueue,
    enqueue_each,
    job,
    real_counts,
    rows,
    state,
)
from tests.store.crowd import Crowd

pytestmark = [
    pytest.mark.usefixtures("engine"),
    pytest.mark.slow,
    pytest.mark.xdist_group("races"),  # one crowd for all of them
]

Race = Callable[..., list[Any]]
"""Makes calls, each in a process of its own, at the same time; returns what each returned."""


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    yield crowd
    crowd.close()


@pytest.fixture
def race(engine: str, crowd: Crowd) -> Race:
    entry = connection().settings_dict
    database = {name: entry[name] for name in ("ENGINE", "NAME", "USER", "HOST", "PORT")}
    return lambda *calls: crowd.race(database, calls)


def test_sixteen_processes_with_one_key_make_one_job(race: Race) -> None:
    answers = race(*[("enqueue_one_key", [])] * 16)
    assert len({job_id for job_id, _ in answers}) == 1
    assert sum(created for _, created in answers) == 1
    assert rows(Job).count() == 1
    assert_counters_exact()


@pytest.mark.parametrize(("tries", "size"), [(50, 1), (20, 3)], ids=["single", "batches"])
def test_racing_producers_never_exceed_a_capacity(tries: int, size: int, race: Race) -> None:
    do(store.set_limits, "tight", capacity=37, max_running=None)
    answers = race(*[("fill", [tries, size])] * 8)
    admitted = [job_id for ids, _ in answers for job_id in ids]
    fits = 37 // size * size
    assert len(admitted) == len(set(admitted)) == fits
    assert set(rows(Job).values_list("id", flat=True)) == set(admitted)
    assert sum(refused for _, refused in answers) == 8 * tries - fits // size
    assert_counters_exact()


def test_racing_claims_give_each_job_exactly_once(race: Race) -> None:
    ids = [a.job_id for a in do(store.enqueue_many, [job() for _ in range(300)])]
    taken = [claim for claims in race(*[("claim_all", [])] * 6) for claim in claims]
    assert sorted(job_id for job_id, _, _ in taken) == ids
    assert len({lease_id for _, lease_id, _ in taken}) == 300
    assert len({token for _, _, token in taken}) == 300
    assert Counter(rows(Lease).values_list("job_id", flat=True)) == Counter(ids)
    assert_counters_exact()


def test_racing_owners_give_room_back_exactly_once(race: Race) -> None:
    do(store.set_limits, "tight", capacity=5, max_running=3)
    done = sum(race(*[("churn", [30])] * 6))
    assert done == rows(Job).filter(state="succeeded").count() > 0
    assert not rows(Lease).filter(ended_at=None).exists()
    assert_counters_exact()
    left = rows(Job).exclude(state="succeeded").count()
    for _ in range(5 - left):
        enqueue(queue="tight")
    with pytest.raises(QueueFull):
        enqueue(queue="tight")


def test_a_queue_that_is_deleted_while_jobs_come_and_go_loses_none_of_them(race: Race) -> None:
    come, go = ("come_and_go", [40]), ("delete_again_and_again", [80])
    answers = race(come, come, come, come, go, go)
    done = sum(answers[:4])
    left = real_counts().get(("now and then", "ready"), 0)
    assert done + left == 160
    assert rows(Queue).exists() or not rows(Job).exists()
    assert len(claim(200, "now and then")) == left
    assert_counters_exact()


def test_racing_words_on_one_lease_let_one_of_them_stand(race: Race) -> None:
    job_id = enqueue()
    held = claim_one()
    words = ["ack", "nack", "release", "snooze"] * 2
    answers = race(*[("settle", [word, held.lease_id, held.token]) for word in words])
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
    assert waiting.wait(60)
    assert rows(Job).count() == 1
    ack(held)
    producer.join(60)
    (answer,) = admitted
    assert (answer.created, state(answer.job_id)) == (True, "ready")
    assert_counters_exact()


def test_of_many_waiting_producers_one_is_admitted_per_place(race: Race) -> None:
    do(store.set_limits, "default", capacity=1, max_running=None)
    enqueue()
    held = claim_one()
    acker = threading.Timer(0.5, lambda: (ack(held), connection().close()))
    acker.start()
    answers = race(*[("wait_for_room", [2.0])] * 4)
    acker.join(60)
    assert len([a for a in answers if a is not None]) == 1
    assert_counters_exact()
