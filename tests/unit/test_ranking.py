"""The stored order: older first, one class per aging step, and never a change while waiting."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay_queue.ranking import (
    MAX_AGING_SECONDS,
    MAX_PRIORITY,
    MIN_AGING_SECONDS,
    MIN_PRIORITY,
    Priority,
    effective_priority,
    rank,
)

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
FIRST = datetime.min.replace(tzinfo=UTC)
LAST = datetime.max.replace(tzinfo=UTC)
INT64 = range(-(2**63), 2**63)

# Every date Python knows, and those at which a queue may really hold a job.
any_date = st.datetimes(timezones=st.just(UTC))
dates = st.datetimes(datetime(1970, 1, 2), datetime(4200, 1, 1), timezones=st.just(UTC))
priorities = st.integers(MIN_PRIORITY, MAX_PRIORITY)
agings = st.floats(MIN_AGING_SECONDS, MAX_AGING_SECONDS)
microseconds = st.integers(1, 10**12).map(lambda n: timedelta(microseconds=n))


@given(dates, microseconds, priorities, st.none() | agings)
def test_in_one_priority_the_older_job_is_first(
    older: datetime, gap: timedelta, priority: int, aging: float | None
) -> None:
    assert rank(older, priority, aging) < rank(older + gap, priority, aging)


@given(dates, priorities, st.integers(1, 200), st.none() | agings)
def test_at_one_moment_the_higher_priority_is_first(
    moment: datetime, priority: int, step: int, aging: float | None
) -> None:
    higher = min(priority + step, MAX_PRIORITY)
    assert (rank(moment, higher, aging) < rank(moment, priority, aging)) == (higher > priority)


@given(st.integers(MIN_PRIORITY, MAX_PRIORITY - 1), st.integers(1, 10**6))
def test_one_aging_step_of_waiting_is_worth_exactly_one_class(priority: int, step: int) -> None:
    waited = rank(NOW - timedelta(seconds=step), priority, step)
    assert waited == rank(NOW, priority + 1, step)
    one = timedelta(microseconds=1)
    assert rank(NOW - timedelta(seconds=step) - one, priority, step) < waited
    assert rank(NOW - timedelta(seconds=step) + one, priority, step) > waited


@given(
    st.tuples(priorities, microseconds),
    st.tuples(priorities, microseconds),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
)
def test_the_order_of_two_jobs_is_that_of_their_effective_priority_at_any_later_time(
    left: tuple[int, timedelta], right: tuple[int, timedelta], aging: int, later: int
) -> None:
    now = NOW + timedelta(seconds=later)
    (left_rank, left_now), (right_rank, right_now) = (
        (
            rank(NOW - waited, priority, aging),
            effective_priority(priority, NOW - waited, aging, now),
        )
        for priority, waited in (left, right)
    )
    if left_rank < right_rank:
        assert left_now >= right_now or left_now == pytest.approx(right_now)
    if left_rank > right_rank:
        assert left_now <= right_now or left_now == pytest.approx(right_now)


@given(any_date, any_date, priorities, priorities)
@example(LAST, FIRST, 1, 0)
@example(datetime(4253, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC), 1, 0)
def test_strict_classes_are_never_crossed_however_long_a_job_waits(
    one: datetime, other: datetime, left: int, right: int
) -> None:
    if left > right:
        assert rank(one, left, None) < rank(other, right, None)


@given(any_date, priorities, st.none() | agings)
def test_a_rank_fits_a_signed_64_bit_column(
    moment: datetime, priority: int, aging: float | None
) -> None:
    assert rank(moment, priority, aging) in INT64


@pytest.mark.parametrize("aging", [None, MIN_AGING_SECONDS, MAX_AGING_SECONDS])
@pytest.mark.parametrize("priority", [MIN_PRIORITY, MAX_PRIORITY])
@pytest.mark.parametrize("moment", [FIRST, LAST])
def test_the_extremes_fit_a_signed_64_bit_column(
    moment: datetime, priority: int, aging: float | None
) -> None:
    assert rank(moment, priority, aging) in INT64


def test_a_normal_job_ranks_by_its_microsecond() -> None:
    assert rank(datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=UTC), 0, 60.0) == 1_000_005
    assert rank(datetime(1970, 1, 1, 0, 2, tzinfo=UTC), Priority.HIGH, 60.0) == 60_000_000


def test_the_everyday_classes_are_ordered_around_normal() -> None:
    assert [Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.URGENT] == [-1, 0, 1, 2]


def test_the_effective_priority_grows_by_one_for_each_aging_step() -> None:
    assert effective_priority(-1, NOW - timedelta(seconds=90), 60.0, NOW) == 0.5


def test_the_effective_priority_does_not_grow_before_the_job_is_due_or_when_strict() -> None:
    assert effective_priority(2, NOW + timedelta(hours=1), 60.0, NOW) == 2.0
    assert effective_priority(2, NOW - timedelta(hours=1), None, NOW) == 2.0
