"""What a process does in a race: the functions that `tests.store.crowd` runs in each of many.

They are named in the calls of a race, and their arguments and answers cross as JSON.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from django.db import OperationalError

from relay_queue import clock, store
from relay_queue.exceptions import QueueFull, QueueInUse
from tests.store.actions import do, job


def enqueue_one_key() -> tuple[int, bool]:
    """Enqueue the job that everybody enqueues; return its id and whether it was made now."""
    answer = do(store.enqueue, job(idempotency_key="the one", args=[1]))
    return answer.job_id, answer.created


def fill(tries: int, size: int) -> tuple[list[int], int]:
    """Enqueue ``size`` jobs at a time; return the ids of those admitted and the refusals."""
    admitted, refused = [], 0
    for _ in range(tries):
        try:
            if size == 1:
                batch = [do(store.enqueue, job(queue="tight"))]
            else:
                batch = do(store.enqueue_many, [job(queue="tight")] * size)
            admitted += [answer.job_id for answer in batch]
        except QueueFull:
            refused += 1
    return admitted, refused


def claim_all() -> list[tuple[int, int, str]]:
    """Claim until nothing is left; return job, lease and token of each."""
    taken = []
    while claims := do(store.claim, worker_id=None, queues=["default"], limit=3):
        taken += [(c.job_id, c.lease_id, c.token) for c in claims]
    return taken


def churn(rounds: int) -> int:
    """Enqueue, claim and ack twice, over and over; return how many acks stood."""
    done = 0
    for _ in range(rounds):
        with suppress(QueueFull):
            do(store.enqueue, job(queue="tight"))
        claims = do(store.claim, worker_id=None, queues=["tight"], limit=2)
        with store.transaction() as tx:
            for c in claims:
                done += store.ack(tx, c.lease_id, c.token).state == "succeeded"
        with store.transaction() as tx:
            for c in claims:
                store.ack(tx, c.lease_id, c.token)
    return done


def settle(verb: str, lease_id: int, token: str) -> tuple[str | None, bool]:
    """Say one word on a lease; return the state it led to and whether the word stood."""
    (answer,) = do(store.settle, [store.Settlement(verb, lease_id, token)])
    return answer.state, answer.accepted


def wait_for_room(seconds: float) -> int | None:
    """Enqueue as soon as there is room; return the id of the job, or None if there never was."""
    try:
        return store.enqueue_waiting(job(), seconds).job_id
    except QueueFull:
        return None


def come_and_go(rounds: int) -> int:
    """Enqueue, run and prune a job, over and over; return how many were run."""
    done = 0
    for _ in range(rounds):
        do(store.enqueue, job(queue="now and then"))
        with store.transaction() as tx:
            for c in store.claim(tx, worker_id=None, queues=["now and then"], limit=9):
                done += store.ack(tx, c.lease_id, c.token).accepted
        do(store.prune, "succeeded", clock.now() + timedelta(seconds=60), 100)
    return done


def delete_again_and_again(rounds: int) -> int:
    """Delete a queue whenever it is empty; return how often that was so."""
    deleted = 0
    for _ in range(rounds):
        with suppress(QueueInUse, OperationalError):
            deleted += do(store.delete_queue, "now and then")
    return deleted
