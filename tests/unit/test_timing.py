"""Timings: slots of cron expressions and of intervals, where clocks change too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from relay_queue.exceptions import InvalidSchedule
from relay_queue.timing import Cron, Every, Timing, cron, every, slots_between

ZONES = {
    "Europe/Berlin": ((2026, 3, 29), (2026, 10, 25)),
    "America/New_York": ((2026, 3, 8), (2026, 11, 1)),
    "America/Santiago": ((2026, 9, 6), (2026, 4, 5)),
    "America/St_Johns": ((2026, 3, 8), (2026, 11, 1)),
    "America/Havana": ((2026, 3, 8), (2026, 11, 1)),
    "Australia/Sydney": ((2026, 10, 4), (2026, 4, 5)),
    "Australia/Lord_Howe": ((2026, 10, 4), (2026, 4, 5)),
    "Pacific/Auckland": ((2026, 9, 27), (2026, 4, 5)),
    "Asia/Jerusalem": ((2026, 3, 27), (2026, 10, 25)),
    "Africa/Cairo": ((2026, 4, 24), (2026, 10, 30)),
    "Atlantic/Azores": ((2026, 3, 29), (2026, 10, 25)),
}
"""The days on which the clocks go forward and back."""

EXPRESSIONS = (
    *("30 2 * * *", "0 0 * * *", "15 1 * * *", "*/30 2 * * *", "0 * * * *", "*/15 * * * *"),
    *("0 1-4 * * *", "30 0,12 * * *", "59 23 * * SUN", "0 3 1 * *", "* 1 * * *", "@daily"),
)


def walk(timing: Timing, begin: datetime, end: datetime) -> Iterator[datetime]:
    """Yield the slots after ``begin``, up to ``end``, one after the other."""
    slot = timing.after(begin)
    while slot is not None and slot <= end:
        yield slot
        slot = timing.after(slot)


def local(zone: str, day: tuple[int, int, int], slots: list[datetime]) -> list[str]:
    """Return the slots of a day as the wall clock of the zone tells them, with their offsets."""
    told = [slot.astimezone(ZoneInfo(zone)) for slot in slots]
    return [t.strftime("%H:%M%z") for t in told if (t.year, t.month, t.day) == day]


def of_day(expression: str, zone: str, day: tuple[int, int, int]) -> list[str]:
    middle = datetime(*day, 12, tzinfo=ZoneInfo(zone)).astimezone(UTC)
    some = timedelta(days=2)
    return local(zone, day, list(walk(cron(expression, zone), middle - some, middle + some)))


GOLDEN = [
    ("30 2 * * *", "Europe/Berlin", 0, ["03:00+0200"]),
    ("30 2 * * *", "Europe/Berlin", 1, ["02:30+0200"]),
    ("*/30 2 * * *", "Europe/Berlin", 0, []),
    ("*/30 2 * * *", "Europe/Berlin", 1, ["02:00+0200", "02:30+0200", "02:00+0100", "02:30+0100"]),
    ("0 1-4 * * *", "Europe/Berlin", 0, ["01:00+0100", "03:00+0200", "04:00+0200"]),
    ("0 1-4 * * *", "Europe/Berlin", 1, ["01:00+0200", "02:00+0200", "03:00+0100", "04:00+0100"]),
    ("30 2 * * *", "America/New_York", 0, ["03:00-0400"]),
    ("30 1 * * *", "America/New_York", 1, ["01:30-0400"]),
    ("0 0 * * *", "America/Santiago", 0, ["01:00-0300"]),
    ("30 23 * * *", "America/Santiago", 1, ["23:30-0400"]),
    ("30 2 * * *", "America/St_Johns", 0, ["03:00-0230"]),
    ("30 1 * * *", "America/St_Johns", 1, ["01:30-0230"]),
    ("0 0 * * *", "America/Havana", 0, ["01:00-0400"]),
    ("30 0 * * *", "America/Havana", 1, ["00:30-0400"]),
    ("30 2 * * *", "Australia/Sydney", 0, ["03:00+1100"]),
    ("30 2 * * *", "Australia/Sydney", 1, ["02:30+1100"]),
    ("15 2 * * *", "Australia/Lord_Howe", 0, ["02:30+1100"]),
    ("45 1 * * *", "Australia/Lord_Howe", 1, ["01:45+1100"]),
    ("30 2 * * *", "Pacific/Auckland", 0, ["03:00+1300"]),
    ("30 2 * * *", "Pacific/Auckland", 1, ["02:30+1300"]),
    ("30 2 * * *", "Asia/Jerusalem", 0, ["03:00+0300"]),
    ("30 1 * * *", "Asia/Jerusalem", 1, ["01:30+0300"]),
    ("30 0 * * *", "Africa/Cairo", 0, ["01:00+0300"]),
    ("0 12 * * *", "Africa/Cairo", 1, ["12:00+0200"]),
    ("30 0 * * *", "Atlantic/Azores", 0, ["01:00+0000"]),
    ("30 0 * * *", "Atlantic/Azores", 1, ["00:30+0000"]),
]


@pytest.mark.parametrize(("expression", "zone", "which", "wanted"), GOLDEN)
def test_slots_of_the_day_on_which_the_clocks_change(
    expression: str, zone: str, which: int, wanted: list[str]
) -> None:
    assert of_day(expression, zone, ZONES[zone][which]) == wanted


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_all_who_ask_agree_on_the_slots_from_wherever_they_begin(
    zone: str, expression: str
) -> None:
    """Workers begin at any moment; each must find the slots of one long walk."""
    dice = random.Random(f"{zone} {expression}")
    timing = cron(expression, zone)
    for day in ZONES[zone]:
        middle = datetime(*day, 12, tzinfo=ZoneInfo(zone)).astimezone(UTC)
        begin, end = middle - timedelta(days=4), middle + timedelta(days=3)
        slots = list(walk(timing, begin, end))
        assert slots == sorted(set(slots))
        for _ in range(20):
            start = middle + timedelta(seconds=dice.uniform(-2, 2) * 86_400)
            later = [slot for slot in slots if slot > start]
            assert list(walk(timing, start, end)) == later
            before = [slot for slot in slots if slot <= start]
            found = slots_between(timing, begin + timedelta(seconds=1), start, 10_000)
            assert found == [slot for slot in reversed(before) if slot > begin]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_a_slot_at_the_very_moment_is_the_newest_and_never_the_next(zone: str) -> None:
    timing = cron("0 12 * * *", zone)
    slot = timing.after(datetime(2026, 6, 1, tzinfo=UTC))
    assert slot is not None
    assert next(timing.backwards(slot)) == slot
    assert next(timing.backwards(slot + timedelta(microseconds=1))) == slot
    assert next(timing.backwards(slot - timedelta(microseconds=1))) == slot - timedelta(days=1)
    assert timing.after(slot) == slot + timedelta(days=1)
    assert timing.after(slot - timedelta(microseconds=1)) == slot


def test_an_expression_that_never_comes_has_no_slot() -> None:
    assert cron("0 0 29 2 MON#1").after(datetime(2026, 1, 1, tzinfo=UTC)) is not None
    with pytest.raises(InvalidSchedule):
        cron("0 0 31 2 *")


@pytest.mark.parametrize(
    ("expression", "zone", "why"),
    [
        ("0 3 * *", "UTC", "has not five fields"),
        ("0 0 3 * * *", "UTC", "has not five fields"),
        ("61 * * * *", "UTC", "Bad minute"),
        ("", "UTC", "has not five fields"),
        ("x" * 101, "UTC", "at most 100 characters"),
        (5, "UTC", "at most 100 characters"),
        ("@reboot", "UTC", "has not five fields"),
        ("@daily", "Mars/Olympus", "no time zone 'Mars/Olympus'"),
        ("@daily", "../etc/passwd", "no time zone"),
        ("@daily", None, "no time zone None"),
    ],
)
def test_an_expression_that_makes_no_sense_is_refused(expression: Any, zone: Any, why: str) -> None:
    with pytest.raises(InvalidSchedule, match=why):
        Cron(expression, zone)


@pytest.mark.parametrize("seconds", [0, 0.5, -1, float("nan"), float("inf"), True, "5", 10**12])
def test_an_interval_out_of_bounds_is_refused(seconds: Any) -> None:
    with pytest.raises(InvalidSchedule, match="use 1 to 31,622,400"):
        every(seconds)


def test_intervals_count_elapsed_seconds_from_their_start() -> None:
    start = datetime(2026, 10, 24, 22, tzinfo=UTC)
    timing = Every(90 * 60, start)
    slots = list(islice(walk(timing, start - timedelta(days=1), start + timedelta(days=1)), 4))
    assert slots == [start + n * timedelta(minutes=90) for n in range(4)]
    assert list(timing.backwards(slots[2])) == slots[2::-1]
    assert list(timing.backwards(start - timedelta(seconds=1))) == []
    assert every(900).after(datetime(2026, 1, 1, 0, 7, tzinfo=UTC)) == datetime(
        2026, 1, 1, 0, 15, tzinfo=UTC
    )


def test_no_more_slots_are_looked_for_than_are_asked_for() -> None:
    until = datetime(2026, 1, 1, tzinfo=UTC)
    found = slots_between(cron("* * * * *"), until - timedelta(days=365), until, 1_000)
    assert len(found) == 1_000
    assert found[0] == until
    assert slots_between(every(60), until, until, 5) == [until]
