"""Numbers and durations are read and written as people do, alike by console and commands."""

import argparse

import pytest
from django.utils import translation

from relay_queue import quantities
from relay_queue.cli import base, output


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45", 45), ("45s", 45), ("1.5m", 90), ("12h", 43_200), ("7d", 604_800), (" 2 H ", 7_200)],
)
def test_duration_is_read(text: str, seconds: float) -> None:
    assert quantities.parse_duration(text) == seconds
    assert base.duration_argument(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1w", "1d2h", "inf", "nan", "9999999999d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no duration|a hundred years"):
        quantities.parse_duration(text)
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no duration|a hundred years"):
        base.duration_argument(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.000_02, "20 µs"),
        (0.25, "250 ms"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (184, "3 min 4 s"),
        (3_599.9, "1 h"),
        (7_199.2, "1 h 59 min"),
        (86_399.9, "1 d"),
        (90_061, "1 d 1 h"),
        (2_000_000_000, "23,148 d"),
        (-75, "-1 min 15 s"),
    ],
)
def test_duration_is_shown_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert quantities.duration(seconds) == text
    assert output.duration(seconds) == text


def test_duration_that_is_not_known_is_a_dash() -> None:
    assert quantities.duration(None) == "–"
    assert output.duration(None) is None


def test_commands_speak_english_whatever_the_language_of_the_project() -> None:
    with translation.override("de"):
        assert quantities.duration(1.5) == "1,5 s"
        assert output.duration(1.5) == "1.5 s"
