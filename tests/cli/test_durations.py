"""Durations are read and written as people do."""

import argparse

import pytest

from relay_queue.cli import durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45", 45), ("45s", 45), ("1.5m", 90), ("12h", 43_200), ("7d", 604_800), (" 2 H ", 7_200)],
)
def test_duration_is_read(text: str, seconds: float) -> None:
    assert durations.parse(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1w", "1d2h", "inf", "nan", "9999999999d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no duration|a hundred years"):
        durations.parse(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, None),
        (0, "0.0 s"),
        (9.96, "10.0 s"),
        (59.6, "1 m"),
        (184, "3 m 4 s"),
        (90_061, "1 d 1 h"),
        (-75, "-1 m 15 s"),
    ],
)
def test_duration_is_shown_in_its_two_largest_units(
    seconds: float | None, text: str | None
) -> None:
    assert durations.show(seconds) == text
