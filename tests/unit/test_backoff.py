"""Delays grow, stay within their bounds, and never overflow."""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay_queue.backoff import MAX_DELAY_SECONDS, Backoff
from relay_queue.exceptions import InvalidJob

seconds = st.floats(0, MAX_DELAY_SECONDS)
backoffs = st.tuples(seconds, seconds).map(lambda pair: Backoff(min(pair), max(pair)))
failures = st.integers(1, 10**6)


def test_the_defaults_double_from_one_second_to_five_minutes() -> None:
    delays = [Backoff().delay_seconds(n) for n in range(1, 12)]
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


@given(backoffs, failures, failures)
def test_more_failures_never_wait_less(backoff: Backoff, one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert backoff.delay_seconds(few) <= backoff.delay_seconds(many)


@given(backoffs, failures)
def test_a_delay_is_between_its_base_and_its_maximum(backoff: Backoff, count: int) -> None:
    assert backoff.base_seconds <= backoff.delay_seconds(count) <= backoff.max_seconds


@given(backoffs, failures, st.integers())
def test_full_jitter_lies_between_zero_and_the_delay_without_jitter(
    backoff: Backoff, count: int, seed: int
) -> None:
    jittered = Backoff(backoff.base_seconds, backoff.max_seconds, "full")
    delay = jittered.delay_seconds(count, random.Random(seed))
    assert 0 <= delay <= backoff.delay_seconds(count)


def test_full_jitter_spreads_over_the_whole_range() -> None:
    rng = random.Random(1)
    delays = [Backoff(10, 10, "full").delay_seconds(1, rng) for _ in range(1000)]
    assert min(delays) < 0.5
    assert max(delays) > 9.5


def test_full_jitter_draws_for_itself_when_given_no_generator() -> None:
    delays = {Backoff(10, 10, "full").delay_seconds(1) for _ in range(20)}
    assert len(delays) > 1


@pytest.mark.parametrize("count", [1024, 1025, 10**6, 2**70])
def test_absurd_numbers_of_failures_wait_the_maximum(count: int) -> None:
    assert Backoff(1e-300, 5).delay_seconds(10**6) == 5
    assert Backoff().delay_seconds(count) == 300


def test_a_base_of_zero_never_waits() -> None:
    assert Backoff(0, 300).delay_seconds(10**6) == 0


def test_no_failure_yet_waits_like_the_first() -> None:
    assert Backoff().delay_seconds(0) == Backoff().delay_seconds(1)


@pytest.mark.parametrize(
    "value", [-1, math.nan, math.inf, -math.inf, MAX_DELAY_SECONDS * 2, True, "1", None]
)
@pytest.mark.parametrize("name", ["base_seconds", "max_seconds"])
def test_a_value_that_makes_no_delay_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidJob, match=name):
        Backoff(**{name: value})


def test_a_base_above_the_maximum_is_refused() -> None:
    with pytest.raises(InvalidJob, match="above its max_seconds of 5"):
        Backoff(base_seconds=10, max_seconds=5)


def test_an_unknown_jitter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidJob, match='"none" or "full"'):
        Backoff(jitter="half")  # type: ignore[arg-type]
