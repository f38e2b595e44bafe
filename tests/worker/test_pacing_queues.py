"""What a loop makes of a ring: a claim at once, or first a check at the tables."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError

from relay_queue import clock, store
from relay_queue.query import looks
from relay_queue.worker import pacing
from relay_queue.worker.options import WorkerOptions
from relay_queue.worker.pacing import Pace, QueueWatch, Timers
from relay_queue.worker.waiting import Woken
from tests import tasks
from tests.store.actions import claim, do
from tests.worker.claims import claim_of

pytestmark = pytest.mark.usefixtures("transactional_db")

SOON_SECONDS = 30.0


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


class Rig:
    """A listening loop without its loop, which has looked once and is idle."""

    def __init__(self) -> None:
        options = WorkerOptions("unit", None, (), None, 2, None, 5.0, False, None)
        self.pace, self.timers = Pace(), Timers()
        self.watch = QueueWatch(options, self.pace, self.timers)
        assert self.watch.read(may_claim_at_once=True), "a new loop looks"
        self.pace.more = False
        self.timers.probed()
        self.timers.written()

    def ring(self, *, idle: bool = True) -> bool:
        """Ring, and return whether the tables were read because of it."""
        self.watch.note(Woken(rung=True))
        return self.turn(idle=idle)

    def turn(self, *, idle: bool = True) -> bool:
        """Take another turn without a ring."""
        self.watch.note(Woken())
        return self.watch.read(may_claim_at_once=idle)

    def learn(self, found: int) -> None:
        """Let a claim for one job find that many, and run out of jobs."""
        self.pace.learn(1, [claim_of(tasks.noop)] * found)


@pytest.fixture
def rig(settings: Any, monkeypatch: pytest.MonkeyPatch, each_engine: None) -> Rig:
    for name in ("PROBE_SECONDS", "HEARTBEAT_SECONDS"):
        monkeypatch.setattr(pacing, name, 300.0)
    settings.RELAY = {**settings.RELAY, "POLL_SECONDS": 300.0}
    tasks.noop.enqueue()
    claim(1)
    return Rig()


def test_an_idle_loop_answers_a_ring_by_a_claim_and_checks_in_the_turn_behind(rig: Rig) -> None:
    assert not rig.ring()
    assert (rig.pace.more, rig.watch.check_due) == (True, True)
    rig.learn(1)
    assert rig.turn()
    assert (rig.pace.more, rig.watch.check_due) == (False, False)
    assert not rig.turn(), "one ring, one check"


def test_a_loop_that_runs_functions_checks_first(rig: Rig) -> None:
    assert rig.ring(idle=False)
    assert (rig.pace.more, rig.watch.check_due) == (False, False)
    tasks.noop.enqueue()
    assert rig.ring(idle=False)
    assert rig.pace.more


def test_after_a_claim_in_vain_a_loop_checks_first_until_a_claim_finds_something(rig: Rig) -> None:
    rig.ring()
    rig.learn(0)
    rig.turn()
    assert rig.ring(), "somebody else was quicker"
    tasks.noop.enqueue()
    assert rig.ring()
    rig.learn(1)
    rig.turn()
    assert not rig.ring()


def test_a_claim_that_nobody_rang_for_says_nothing_of_rings(rig: Rig) -> None:
    rig.ring()
    rig.learn(1)
    rig.learn(0)
    rig.turn()
    assert not rig.ring()


def test_a_ring_between_claim_and_glance_is_answered_by_that_glance(rig: Rig) -> None:
    rig.ring()
    tasks.noop.enqueue()
    assert rig.ring()
    assert rig.pace.more
    assert not rig.turn()


def test_a_queue_that_was_not_there_before_is_found_by_the_glance(rig: Rig) -> None:
    tasks.noop.using(queue_name="new").enqueue()
    rig.ring()
    assert rig.watch.queues == ["default"]
    rig.learn(0)
    rig.turn()
    assert rig.watch.queues == ["default", "new"]
    assert rig.pace.more


def test_a_job_that_is_due_later_is_planned_for_by_the_glance(rig: Rig) -> None:
    due = clock.now() + timedelta(seconds=SOON_SECONDS)
    tasks.noop.using(run_after=due).enqueue()
    rig.ring()
    rig.learn(0)
    rig.turn()
    assert SOON_SECONDS - 10 < rig.timers.seconds_until(dirty=False) <= SOON_SECONDS


def test_a_paused_queue_has_no_work_until_it_is_resumed(rig: Rig) -> None:
    do(store.pause, "default")
    tasks.noop.enqueue()
    rig.ring(idle=False)
    assert not rig.pace.more
    do(store.resume, "default")
    rig.ring(idle=False)
    assert rig.pace.more


def test_a_loop_that_found_no_work_begins_anew_with_one(rig: Rig) -> None:
    rig.ring()
    rig.learn(1)
    assert rig.pace.ask(8) == 2
    rig.turn()
    rig.ring()
    assert rig.pace.ask(8) == 1


def test_a_glance_that_failed_is_made_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> set[str]:
        raise OperationalError("locked")

    rig.ring()
    with monkeypatch.context() as broken:
        broken.setattr(looks, "ready_queues", fail)
        with pytest.raises(OperationalError):
            rig.turn()
    assert rig.watch.check_due
    assert rig.turn()
    assert not rig.turn()
