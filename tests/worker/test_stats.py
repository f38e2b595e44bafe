"""What a worker counts, by queue and minute."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from relay_queue import store
from relay_queue.states import Outcome, State
from relay_queue.store.records import Recovered, Settled
from relay_queue.worker.stats import Stats
from tests import tasks
from tests.worker.claims import NOON, claim_of


@pytest.fixture
def stats() -> Stats:
    return Stats()


def minute(stats: Stats, queue: str = "default") -> store.Totals:
    return stats.minutes[queue, NOON]


def test_nothing_done_is_nothing_to_write(stats: Stats) -> None:
    assert not stats.dirty
    stats.claimed([], NOON)
    stats.recovered([], NOON)
    assert not stats.dirty


def test_a_claim_counts_with_the_time_that_the_job_has_waited(stats: Stats) -> None:
    stats.claimed([replace(claim_of(tasks.noop), wait_seconds=1.5)], NOON + timedelta(seconds=59))
    assert stats.dirty
    assert minute(stats).claimed == stats.totals.claimed == 1
    assert minute(stats).wait == {store.bucket(1.5): 1}


@pytest.mark.parametrize(
    ("state", "counted"),
    [
        (State.SUCCEEDED, {"succeeded": 1}),
        (State.RETRYING, {"failed": 1, "retried": 1}),
        (State.DEAD, {"failed": 1, "died": 1}),
        (State.READY, {}),  # released
        (State.SCHEDULED, {}),  # snoozed
    ],
)
def test_an_outcome_counts_by_where_the_job_goes(
    stats: Stats, state: State, counted: dict[str, int]
) -> None:
    stats.settled([Settled(1, 2, "default", state)], {1: 0.25}, NOON)
    names = ("succeeded", "failed", "retried", "died", "refused", "expired")
    assert {n: getattr(minute(stats), n) for n in names if getattr(minute(stats), n)} == counted
    assert minute(stats).run == {store.bucket(0.25): 1}
    assert stats.totals.failed == counted.get("failed", 0)


def test_a_refused_outcome_counts_as_that_and_nothing_else(stats: Stats) -> None:
    late = Settled(1, 2, "default", State.SUCCEEDED, "the lease had expired")
    stats.settled([late], {1: 0.25}, NOON)
    assert (minute(stats).refused, stats.totals.refused) == (1, 1)
    assert (minute(stats).succeeded, minute(stats).run) == (0, {})


def test_an_outcome_that_no_slot_has_told_has_no_run_time(stats: Stats) -> None:
    stats.settled([Settled(1, 2, "default", State.READY)], {}, NOON)
    assert minute(stats).run == {}


def test_leases_ended_for_others_count_where_they_ran_out_or_the_job_died(stats: Stats) -> None:
    ended = [
        Recovered(1, 1, "default", Outcome.EXPIRED, State.READY),
        Recovered(2, 2, "default", Outcome.LOST, State.DEAD),
        Recovered(3, 3, "other", Outcome.EXPIRED, State.DEAD),
    ]
    stats.recovered(ended, NOON)
    assert (minute(stats).expired, minute(stats).died) == (1, 1)
    assert (minute(stats, "other").expired, minute(stats, "other").died) == (1, 1)


def test_a_minute_is_kept_until_it_is_long_over_and_written(stats: Stats) -> None:
    stats.claimed([claim_of(tasks.noop)], NOON)
    stats.written(NOON + timedelta(seconds=30))
    assert not stats.dirty
    assert minute(stats).claimed == 1, "the row is replaced, so the minute goes on from here"
    stats.claimed([claim_of(tasks.noop)], NOON + timedelta(seconds=61))
    stats.written(NOON + timedelta(seconds=62))
    assert len(stats.minutes) == 2, "a clock that steps back a little must not lose the minute"
    stats.written(NOON + timedelta(seconds=180))
    assert list(stats.minutes) == [("default", NOON + timedelta(seconds=60))]
    assert stats.totals.claimed == 2
