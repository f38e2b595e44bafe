"""The tick: one transaction in a fixed order, on the real store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from django.db import OperationalError, connection

from relay_queue import store
from relay_queue.context import JobContext
from relay_queue.db.gate import gate_of
from relay_queue.models import Job, Lease, QueueMinute, Worker
from relay_queue.store.records import Claim, Settlement
from relay_queue.worker import tick as module
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.plan import CLAIM, COUNT, PROMOTE, RENEW, SETTLE, Done, Plan
from relay_queue.worker.stats import Stats
from relay_queue.worker.tick import passed, tick
from tests.store import actions

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


@pytest.fixture
def worker_id(transactional_db: None) -> int:
    return actions.register()


def plan(worker_id: int, told: Sequence[Settlement] = (), places: int = 0, **more: Any) -> Plan:
    """Make a plan for the queue ``default``."""
    return Plan(worker_id, lambda: told, lambda: places, queues=["default"], **more)


def ack(claim: Claim) -> Settlement:
    return claim.settlement("ack", "null")


def held(claim: Claim) -> Attempt:
    return Attempt(claim, JobContext.of(claim), 0.0)


def test_a_living_worker_whose_row_was_deleted_registers_again_under_its_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    new = store.NewWorker("0a" * 16, "w", "host", "boot", 7, None, None, ["default"], 4)
    worker_id = actions.do(store.register_worker, new)
    actions.enqueue()
    (claim,) = tick(plan(worker_id, places=1, registered=new)).claims
    Worker.objects.all().delete()
    tick(plan(worker_id, [ack(claim)], registered=new, order="quiet", stats=Stats()))
    row = Worker.objects.get()
    assert (row.id, row.incarnation, row.pid, row.stopped_at) == (worker_id, "0a" * 16, 7, None)
    assert row.ordered == "quiet"
    assert "was deleted; registering again" in caplog.text
    caplog.clear()
    tick(plan(worker_id, registered=new, stats=Stats()))
    assert (Worker.objects.count(), caplog.text) == (1, "")
    assert actions.register() > worker_id, "no id is given twice"


def test_outcome_and_next_claim_share_one_commit(worker_id: int) -> None:
    actions.enqueue_each(2)
    first = tick(plan(worker_id, places=1)).claims[0]
    done = tick(plan(worker_id, [ack(first)], places=1))
    assert [answer.state for answer in done.answers] == ["succeeded"]
    assert len(done.claims) == done.asked == 1
    ended = Lease.objects.get(pk=first.lease_id).ended_at
    # One reading of the clock; of a server's, another one when the jobs were picked.
    again = done.claims[0].acquired_at
    assert ended == again if connection.vendor == "sqlite" else ended <= again


def test_the_place_of_a_job_that_is_settled_is_given_on_in_the_same_tick(worker_id: int) -> None:
    with store.transaction() as tx:
        store.ensure_queue(tx, "default")
        store.set_limits(tx, "default", capacity=None, max_running=1)
    actions.enqueue_each(2)
    (first,) = tick(plan(worker_id, places=5)).claims
    assert len(tick(plan(worker_id, [ack(first)], places=5)).claims) == 1


def test_settlements_and_places_are_asked_for_when_the_writer_is_won(worker_id: int) -> None:
    asked = []

    def settlements() -> list[Settlement]:
        asked.append(("settlements", connection.in_atomic_block))
        return []

    def places() -> int:
        asked.append(("places", connection.in_atomic_block))
        return 0

    tick(Plan(worker_id, settlements, places))
    assert asked == [("settlements", True), ("places", True)]


def test_a_lease_that_was_settled_is_not_renewed_as_well(worker_id: int) -> None:
    actions.enqueue_each(2)
    settled, running = tick(plan(worker_id, places=2)).claims
    done = tick(plan(worker_id, [ack(settled)], renew=[held(settled), held(running)]))
    assert done.renewed == {running.lease_id}
    assert done.lost == set()


def test_a_lease_that_cannot_be_renewed_is_lost(worker_id: int) -> None:
    job_id = actions.enqueue()
    (claim,) = tick(plan(worker_id, places=1)).claims
    actions.cancel(job_id)
    done = tick(plan(worker_id, renew=[held(claim)]))
    assert (done.renewed, done.lost) == (set(), {claim.lease_id})


def test_a_tick_leaves_the_ring_to_the_loop(worker_id: int) -> None:
    actions.enqueue()
    (claim,) = tick(plan(worker_id, places=1)).claims
    Lease.objects.filter(pk=claim.lease_id).update(expires_at=claim.acquired_at)
    with mock.patch("relay_queue.wakeup.ring") as ring:
        assert len(tick(plan(worker_id)).recovered) == 1
        Job.objects.update(state="scheduled")
        assert tick(plan(worker_id)).promoted == 1
        ring.assert_not_called()


def test_an_expired_lease_is_ended_and_its_job_claimed_in_the_same_tick(worker_id: int) -> None:
    actions.enqueue()
    (claim,) = tick(plan(worker_id, places=1)).claims
    Lease.objects.filter(pk=claim.lease_id).update(expires_at=claim.acquired_at)
    assert tick(plan(worker_id, places=1, may_expire=False)).claims == []
    done = tick(plan(worker_id, places=1))
    assert [each.lease_id for each in done.recovered] == [claim.lease_id]
    assert [each.attempt for each in done.claims] == [2]


def test_an_outcome_that_comes_in_time_goes_before_the_end_of_its_lease(worker_id: int) -> None:
    actions.enqueue()
    (claim,) = tick(plan(worker_id, places=1)).claims
    done = tick(plan(worker_id, [ack(claim)]))
    assert (done.answers[0].state, done.recovered) == ("succeeded", [])


def test_a_job_that_is_due_is_claimed_in_the_tick_that_wakes_it(worker_id: int) -> None:
    actions.enqueue()
    (claim,) = tick(plan(worker_id, places=1)).claims
    told = claim.settlement("nack", delay_seconds=0.0)
    done = tick(plan(worker_id, [told], places=1))
    assert done.promoted == 1
    assert [each.attempt for each in done.claims] == [2]


def test_statistics_are_written_only_when_they_are_due(worker_id: int) -> None:
    stats = Stats()
    actions.enqueue()
    done = tick(plan(worker_id, places=1))
    stats.claimed(done.claims, done.now)
    tick(plan(worker_id))
    assert not QueueMinute.objects.exists()
    before = Worker.objects.get().heartbeat_at
    tick(plan(worker_id, stats=stats))
    assert QueueMinute.objects.get().claimed == Worker.objects.get().claimed == 1
    assert Worker.objects.get().heartbeat_at > before


def test_a_tick_that_fails_has_done_nothing(
    worker_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions.enqueue_each(2)
    (first,) = tick(plan(worker_id, places=1)).claims
    before = actions.everything()

    def broken(*_: object) -> None:
        raise OperationalError("disk I/O error")

    monkeypatch.setattr(store, "heartbeat", broken)
    with pytest.raises(OperationalError):
        tick(plan(worker_id, [ack(first)], places=1, stats=Stats()))
    assert actions.everything() == before


REFUSE = {
    "sqlite": """
        CREATE TEMP TRIGGER refuse BEFORE UPDATE OF result ON relay_queue_job WHEN {condition}
        BEGIN SELECT RAISE(ABORT, 'not this one'); END""",
    "postgresql": """
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE OF result ON relay_queue_job
        FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse()""",
}
FORGET = {"sqlite": "DROP TRIGGER refuse", "postgresql": "DROP FUNCTION refuse CASCADE"}
"""How an engine is told to refuse one row, and how to forget it."""


def test_an_outcome_that_the_database_refuses_becomes_a_failed_attempt(
    worker_id: int,
    engine: str,
) -> None:
    actions.enqueue_each(3)
    claims = tick(plan(worker_id, places=3)).claims
    told = [ack(claim) for claim in claims]
    condition = f"new.id = {claims[1].job_id} AND new.result IS NOT NULL"
    with connection.cursor() as cursor:
        cursor.execute(REFUSE[engine].format(condition=condition))
    try:
        done = tick(plan(worker_id, told, places=5, careful=True))
    finally:
        with connection.cursor() as cursor:
            cursor.execute(FORGET[engine])
    states = {answer.job_id: answer.state for answer in done.answers}
    expected = ["succeeded", "retrying", "succeeded"]
    assert states == dict(zip([c.job_id for c in claims], expected, strict=True))
    assert (done.claims, done.faults) == ([], {})
    failed = Lease.objects.get(pk=claims[1].lease_id)
    assert (failed.outcome, failed.error) == ("failed", "relay_queue.exceptions.Unstorable")
    assert "could not be written" in Job.objects.get(pk=claims[1].job_id).last_error
    actions.assert_counters_exact()


@pytest.mark.parametrize("engine", ["sqlite"])
def test_a_tick_waits_no_longer_than_a_slice_for_the_writer(
    worker_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must look after time limits in between, whoever holds the writer."""
    monkeypatch.setattr(module, "SLICE_SECONDS", 0.05)
    gate = gate_of(connection)
    assert gate is not None
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with gate.acquire(60):
            taken.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert taken.wait(60)
        with pytest.raises(OperationalError, match="database is locked"):
            tick(plan(worker_id))
    finally:
        done.set()
        holder.join()
    assert tick(plan(worker_id)).claims == []


def test_a_step_with_nothing_left_to_do_has_passed_and_one_that_was_not_tried_has_not(
    worker_id: int,
) -> None:
    idle = plan(worker_id)
    assert passed(idle, Done()) == {SETTLE, RENEW}
    assert passed(idle, Done(faults={SETTLE: ValueError()})) == {RENEW}
    busy = plan(worker_id, stats=Stats())
    done = Done(asked=1, tried={PROMOTE}, faults={PROMOTE: ValueError()})
    assert passed(busy, done) == {SETTLE, RENEW, CLAIM, COUNT}
