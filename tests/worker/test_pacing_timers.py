"""When a loop looks, probes, recovers and writes; and when it holds back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from relay_queue.worker import pacing
from relay_queue.worker.pacing import (
    HEARTBEAT_SECONDS,
    PROBE_SECONDS,
    QUIET_SECONDS,
    STALL_SECONDS,
    Timers,
)
from tests.worker.claims import NOON
from tests.worker.monotonic import Monotonic, stop_time

POLL_SECONDS = 60.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Monotonic:
    settings.RELAY = {"POLL_SECONDS": POLL_SECONDS}
    return stop_time(monkeypatch, pacing)


@pytest.fixture
def rested(clock: Monotonic) -> Timers:
    """Return timers after the first look, probe, write and tick."""
    made = Timers()
    made.looked()
    made.probed()
    made.written()
    made.ticked(0)
    return made


def in_seconds(seconds: float) -> Any:
    return NOON + timedelta(seconds=seconds)


def test_a_new_loop_looks_and_probes_at_once_and_recovers_before_it_claims(
    clock: Monotonic,
) -> None:
    new = Timers()
    assert new.seconds_until(dirty=False) == 0
    assert new.look_due()
    assert new.probe_due()
    assert not new.may_claim()
    new.ticked(0)
    assert new.may_claim()


def test_an_idle_loop_sleeps_until_the_next_probe(rested: Timers) -> None:
    assert rested.seconds_until(None, dirty=False) == PROBE_SECONDS


def test_it_wakes_for_whatever_comes_first(rested: Timers, clock: Monotonic) -> None:
    assert rested.seconds_until(clock.now + 0.25, None, clock.now + 0.5, dirty=False) == 0.25
    assert rested.seconds_until(clock.now - 5, dirty=False) == 0


def test_nobody_rings_and_still_it_looks_after_the_poll_interval(
    rested: Timers, clock: Monotonic
) -> None:
    clock.advance(POLL_SECONDS - 0.01)
    assert not rested.look_due()
    clock.advance(0.01)
    assert rested.look_due()


@pytest.mark.parametrize("what", ["due", "expiry"])
def test_it_looks_when_something_is_due_before_that(
    rested: Timers, clock: Monotonic, what: str
) -> None:
    moment = in_seconds(2)
    rested.plan(moment if what == "due" else None, moment if what == "expiry" else None, NOON)
    assert not rested.due
    clock.advance(2)
    assert rested.look_due()


@pytest.mark.parametrize("what", ["due", "expiry"])
def test_what_is_due_already_needs_a_tick_and_then_a_look(
    rested: Timers, clock: Monotonic, what: str
) -> None:
    moment = in_seconds(-1)
    rested.plan(moment if what == "due" else None, moment if what == "expiry" else None, NOON)
    assert rested.due
    rested.ticked(moved=1)
    assert not rested.due
    assert rested.look_due(), "there may be more, or the next one"


def test_what_only_looks_due_makes_no_busy_loop(rested: Timers) -> None:
    rested.plan(in_seconds(-1), None, NOON)
    rested.ticked(moved=0)
    assert not rested.due
    assert not rested.look_due()


def test_a_far_plan_never_delays_the_next_look(rested: Timers, clock: Monotonic) -> None:
    rested.plan(in_seconds(1_000_000), in_seconds(1_000_000), NOON)
    clock.advance(POLL_SECONDS)
    assert rested.look_due()


def test_a_loop_that_waited_long_does_not_end_leases_for_a_while(
    rested: Timers, clock: Monotonic
) -> None:
    assert rested.may_recover(STALL_SECONDS)
    assert not rested.may_recover(STALL_SECONDS + 0.1)
    clock.advance(QUIET_SECONDS - 0.1)
    assert not rested.may_recover(0)
    clock.advance(0.1)
    assert rested.may_recover(0)


def test_a_loop_that_overslept_does_not_end_leases_for_a_while(
    rested: Timers, clock: Monotonic
) -> None:
    rested.overslept(STALL_SECONDS)
    assert rested.may_recover(0)
    rested.overslept(90)
    assert not rested.may_recover(0)


def test_an_expiry_that_may_not_be_acted_on_yet_makes_no_busy_loop(
    rested: Timers, clock: Monotonic
) -> None:
    rested.overslept(90)
    rested.plan(None, in_seconds(-10), NOON)
    assert not rested.due
    assert rested.seconds_until(dirty=False) > 0
    clock.advance(QUIET_SECONDS)
    assert rested.look_due()
    rested.plan(None, in_seconds(-12), NOON)
    assert rested.due


def test_statistics_are_written_soon_if_there_are_any_and_the_heartbeat_in_any_case(
    rested: Timers, clock: Monotonic
) -> None:
    assert not rested.write_due(dirty=True)
    clock.advance(pacing.FLUSH_SECONDS)
    assert rested.write_due(dirty=True)
    assert not rested.write_due(dirty=False)
    clock.advance(HEARTBEAT_SECONDS - pacing.FLUSH_SECONDS)
    assert rested.write_due(dirty=False)
    rested.written()
    assert not rested.write_due(dirty=True)


def test_on_a_full_disk_it_neither_claims_nor_ticks_for_a_while(
    rested: Timers, clock: Monotonic
) -> None:
    rested.hold_claims(1.0)
    assert not rested.may_claim()
    assert rested.retry_in() == 1.0
    clock.advance(1.0)
    assert rested.may_claim()
    assert rested.retry_in() == 0
