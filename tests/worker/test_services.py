"""Services of a worker: those inside the tick, and housekeeping between ticks in small bites."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError

from relay_queue import clock as wall_clock
from relay_queue import store
from relay_queue.models import BulkAct, Job, QueueMinute, Worker
from relay_queue.worker import services
from relay_queue.worker import tick as tick_module
from relay_queue.worker.plan import Done, Plan
from relay_queue.worker.services import BREATH_SECONDS, INTERVAL_SECONDS, Housekeeper
from tests.store import actions
from tests.worker.monotonic import Monotonic, stop_time

pytestmark = pytest.mark.usefixtures("transactional_db")

DAY = 86_400.0


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Monotonic:
    settings.RELAY = {
        "RETAIN_SUCCEEDED_SECONDS": DAY,
        "RETAIN_CANCELLED_SECONDS": 2 * DAY,
        "RETAIN_DEAD_SECONDS": None,
    }
    return stop_time(monkeypatch, services)


def finish(count: int, state: str, days_ago: float) -> None:
    """Make jobs that have finished some days ago."""
    with wall_clock.use(_ago(days_ago)):
        for job_id in actions.enqueue_each(count):
            if state == "cancelled":
                actions.cancel(job_id)
                continue
            held = actions.claim_one()
            actions.ack(held) if state == "succeeded" else actions.nack(held, fatal=True)


def _ago(days: float) -> Any:
    moment = wall_clock.now() - timedelta(days=days)
    return lambda: moment


def work_through(chores: Housekeeper, clock: Monotonic) -> int:
    """Take bites until the next one is a whole interval away; return how many it took."""
    bites = 0
    while bites < 100:
        clock.now = max(clock.now, chores.next_at)
        chores.step()
        bites += 1
        if chores.next_at - clock.now > 2 * BREATH_SECONDS:
            return bites
    raise AssertionError("it never rests")


def test_the_first_bite_is_neither_at_once_nor_at_the_same_time_for_all(clock: Monotonic) -> None:
    times = {Housekeeper().next_at - clock.now for _ in range(20)}
    assert min(times) >= INTERVAL_SECONDS / 2
    assert len(times) > 10
    assert not Housekeeper().due()


def test_finished_jobs_are_kept_as_long_as_the_settings_say(clock: Monotonic) -> None:
    for state in ("succeeded", "cancelled", "dead"):
        finish(1, state, days_ago=1.5)
        finish(1, state, days_ago=2.5)
    finish(1, "succeeded", days_ago=0.5)
    work_through(Housekeeper(), clock)
    kept = sorted(Job.objects.values_list("state", flat=True))
    assert kept == ["cancelled", "dead", "dead", "succeeded"]
    actions.assert_counters_exact()


def test_old_minutes_workers_and_bulk_acts_go_too_and_the_young_stay(clock: Monotonic) -> None:
    for days in (1, 30):
        with wall_clock.use(_ago(days)):
            worker_id = actions.register(incarnation=f"{days:032x}")
            actions.do(store.stop_workers, [worker_id], "stopped")
            minute = wall_clock.now().replace(second=0, microsecond=0)
            totals = {("default", minute): store.Totals(claimed=1)}
            actions.do(store.roll_up, worker_id, totals)
            bulk = store.NewBulkAct(
                str(days), "cancel", None, "", "", "", "", 1, 1, "1", "ada", "admin"
            )
            actions.do(store.finish_bulk, actions.do(store.start_bulk, bulk))
    work_through(Housekeeper(), clock)
    assert QueueMinute.objects.count() == 1
    assert [worker.incarnation for worker in Worker.objects.all()] == [f"{1:032x}"]
    assert [bulk.nonce for bulk in BulkAct.objects.all()] == ["1"]


def test_a_lot_is_deleted_in_bites_with_a_breath_between(
    clock: Monotonic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "BITE_ROWS", 3)
    finish(10, "succeeded", days_ago=2)
    chores = Housekeeper()
    sizes = []
    for _ in range(4):
        clock.now = chores.next_at
        before = Job.objects.count()
        chores.step()
        sizes.append(before - Job.objects.count())
        assert chores.next_at - clock.now == pytest.approx(BREATH_SECONDS)
        assert not chores.due()
    assert sizes == [3, 3, 3, 1]


def test_after_the_last_chore_it_rests_and_then_begins_again(clock: Monotonic) -> None:
    chores = Housekeeper()
    assert work_through(chores, clock) > 1
    rest = chores.next_at - clock.now
    assert 0.75 * INTERVAL_SECONDS <= rest <= 1.25 * INTERVAL_SECONDS
    finish(1, "succeeded", days_ago=2)
    work_through(chores, clock)
    assert not Job.objects.exists()


def test_a_database_that_is_busy_is_left_alone_until_the_next_time(
    clock: Monotonic, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(1, "succeeded", days_ago=2)
    chores = Housekeeper()
    clock.now = chores.next_at
    with monkeypatch.context() as broken:
        broken.setattr(store, "prune", _busy)
        chores.step()
    assert Job.objects.count() == 1
    assert chores.next_at - clock.now >= 0.75 * INTERVAL_SECONDS
    work_through(chores, clock)
    assert not Job.objects.exists()


def test_a_bite_that_always_fails_does_not_keep_those_behind_it_from_their_turn(
    clock: Monotonic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wall_clock.use(_ago(30)):
        actions.do(store.stop_workers, [actions.register()], "stopped")
    monkeypatch.setattr(store, "prune", _busy)
    chores = Housekeeper()
    for _ in range(12):
        clock.now = max(clock.now, chores.next_at)
        chores.step()
    assert not Worker.objects.exists()


class Fire:
    """A service that enqueues a job whenever it is due."""

    step = "enqueue one more"
    point = None

    def __init__(
        self, error: Exception | None = None, *, due: bool = True, ghosts: bool = False
    ) -> None:
        self.error = error
        self.ghosts = ghosts
        self.is_due = due

    def due(self, _plan: Plan) -> bool:
        return self.is_due

    def serve(
        self, tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None
    ) -> int:
        store.enqueue(tx, actions.job())
        if self.ghosts:
            done.promoted += 1
            tx.count("no such queue", "no such state", 1 << 80)  # fails at the savepoint's end
        if self.error is not None:
            raise self.error
        return 1


def ticked(monkeypatch: pytest.MonkeyPatch, service: Fire, *, careful: bool = False) -> Done:
    """Tick with one more service, and claim what there is."""
    with monkeypatch.context() as plugged:
        plugged.setattr(tick_module, "IN_TICK", (*services.IN_TICK, service))
        plan = Plan(actions.register(), list, lambda: 5, queues=["default"], careful=careful)
        return tick_module.tick(plan)


@pytest.mark.parametrize("careful", [False, True])
def test_what_a_service_makes_ready_is_claimed_in_the_same_commit(
    monkeypatch: pytest.MonkeyPatch, careful: bool
) -> None:
    actions.enqueue()  # so that the queue is known
    done = ticked(monkeypatch, Fire(), careful=careful)
    assert (len(done.claims), done.moved, done.faults) == (2, 1, {})
    assert Fire.step in done.tried


def test_what_the_end_of_a_savepoint_undoes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    actions.enqueue()
    done = ticked(monkeypatch, Fire(ghosts=True), careful=True)
    assert (list(done.faults), done.promoted, done.moved) == ([Fire.step], 0, 0)


def test_a_service_that_is_not_due_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = ticked(monkeypatch, Fire(due=False))
    assert (done.moved, Fire.step in done.tried, Job.objects.count()) == (0, False, 0)


def test_a_service_that_fails_undoes_the_tick_and_in_a_careful_one_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actions.enqueue()
    wrong = Fire(ValueError("no such schedule"))
    with pytest.raises(ValueError, match="no such schedule"):
        ticked(monkeypatch, wrong)
    assert [job.state for job in Job.objects.all()] == ["ready"]
    done = ticked(monkeypatch, wrong, careful=True)
    assert (list(done.faults), len(done.claims), done.moved) == ([Fire.step], 1, 0)


def _busy(*_: object) -> int:
    raise OperationalError("database is locked")
