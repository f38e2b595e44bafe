"""Ids that no row can have are unknown ids: no verb fails at them, on any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relay_queue import store, validation
from relay_queue.compat import TaskResultDoesNotExist
from relay_queue.exceptions import JobNotFound
from relay_queue.operations import CANCEL, REQUEUE
from relay_queue.query import ledger
from relay_queue.results import stored_result
from relay_queue.states import State, WorkerOrder
from tests.store.actions import claim_one, do, enqueue, nothing_written, read

pytestmark = pytest.mark.usefixtures("wall")

BEYOND = [2**63, -(2**63) - 1, 10**40, 10**5_000, 0, -1]

ON_JOBS: list[Callable[..., store.Changed]] = [
    store.cancel,
    store.requeue,
    store.run_now,
    store.discard,
    store.release_leases,
]
ON_LEASES: list[Callable[..., Any]] = [store.ack, store.nack, store.release]


def test_verbs_on_jobs_pass_over_ids_that_no_row_can_have() -> None:
    job_id = enqueue()
    with nothing_written():
        for verb in ON_JOBS:
            changed = do(verb, BEYOND)
            assert (changed.job_ids, changed.skipped) == ([], {})
        assert do(store.set_priority, BEYOND, 3).job_ids == []
    assert do(store.cancel, [*BEYOND, job_id, validation.MAX_ID]).job_ids == [job_id]


@pytest.mark.parametrize("verb", [CANCEL.change_one, REQUEUE.change_one])
def test_verbs_on_one_job_say_that_there_is_none(verb: Callable[..., None]) -> None:
    for job_id in BEYOND:
        with pytest.raises(JobNotFound):
            do(verb, job_id)


def test_settlements_of_leases_that_cannot_be_are_refused_and_others_are_not() -> None:
    enqueue()
    held = claim_one()
    for lease_id in BEYOND:
        for verb in ON_LEASES:
            assert do(verb, lease_id, "token").reason == "no lease has this id and token"
        assert not do(store.snooze, lease_id, "token", 1.0).accepted
    told = [store.Settlement("ack", id_, held.token) for id_ in (2**63, held.lease_id, 10**40)]
    assert [bool(settled.reason) for settled in do(store.settle, told)] == [True, False, True]
    assert read(held.job_id).state == State.SUCCEEDED


def test_leases_that_cannot_be_are_not_renewed_and_others_are() -> None:
    enqueue()
    held = claim_one()
    leases = [(lease_id, held.token, 60.0) for lease_id in (*BEYOND, held.lease_id)]
    assert do(store.renew, leases) == {held.lease_id}
    assert do(store.renew, leases[:1]) == set()


def test_workers_that_cannot_be_are_told_nothing() -> None:
    with nothing_written():
        assert do(store.order_workers, BEYOND, WorkerOrder.STOP) == []
        assert do(store.stop_workers, BEYOND, "died") == 0
        assert do(store.recover_dead, BEYOND) == []


def test_bulk_acts_that_cannot_be_are_over() -> None:
    with nothing_written():
        for bulk_id in BEYOND:
            assert not do(store.take_bulk_turn, bulk_id, 0, 9)
            assert not do(store.cancel_bulk, bulk_id)
            assert not do(store.finish_bulk, bulk_id)


def test_the_story_and_the_result_of_a_job_that_cannot_be_are_not_there() -> None:
    for job_id in BEYOND[:3]:
        with pytest.raises(JobNotFound):
            ledger.story(job_id)
        with pytest.raises(TaskResultDoesNotExist):
            stored_result(str(job_id))
