"""One clock, replaceable, and exact whole microseconds."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay_queue import clock

MOMENT = datetime(2026, 2, 3, 4, 5, 6, 7, tzinfo=UTC)


def test_now_is_aware_and_in_utc() -> None:
    assert clock.now().tzinfo is UTC


def test_now_lies_between_two_readings_of_the_wall_clock() -> None:
    before = datetime.now(UTC)
    assert before <= clock.now() <= datetime.now(UTC)


def test_a_source_holds_inside_its_block_and_blocks_may_nest() -> None:
    with clock.use(lambda: MOMENT):
        with clock.use(lambda: MOMENT + timedelta(1)):
            assert clock.now() == MOMENT + timedelta(1)
        assert clock.now() == MOMENT
    assert clock.now() != MOMENT


def test_the_source_is_put_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), clock.use(lambda: MOMENT):
        raise ZeroDivisionError
    assert clock.now() != MOMENT


@given(st.datetimes(timezones=st.just(UTC)))
def test_microseconds_are_exact_for_every_date(moment: datetime) -> None:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert epoch + timedelta(microseconds=clock.to_microseconds(moment)) == moment


@given(st.datetimes(timezones=st.just(UTC)), st.datetimes(timezones=st.just(UTC)))
def test_microseconds_keep_the_order_of_dates(one: datetime, other: datetime) -> None:
    assert (clock.to_microseconds(one) < clock.to_microseconds(other)) == (one < other)


def test_microseconds_do_not_depend_on_the_time_zone() -> None:
    there = MOMENT.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert clock.to_microseconds(there) == clock.to_microseconds(MOMENT)


def test_the_epoch_is_zero() -> None:
    assert clock.to_microseconds(datetime(1970, 1, 1, tzinfo=UTC)) == 0
