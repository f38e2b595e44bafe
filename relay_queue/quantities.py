"""Numbers and durations as people read and write them, in the active language.

The console and the commands show them by the same functions.
"""

from __future__ import annotations

import re
from typing import Final

from django.utils.formats import number_format
from django.utils.translation import gettext as _

MINUTE: Final = 60
HOUR: Final = 3_600
DAY: Final = 86_400

UNITS: Final = {"d": DAY, "h": HOUR, "m": MINUTE, "s": 1}
"""Seconds in each unit of a duration that is typed."""

MAX_SECONDS: Final = 100 * 365 * DAY


def parse_duration(text: str) -> float:
    """Return the seconds of ``7d``, ``12h``, ``30m``, ``45s`` or ``45``.

    Raises ``ValueError`` for anything else, and for more than a hundred years.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([dhms]?)", text.strip().lower(), re.ASCII)
    if not found:
        raise ValueError(f"{text!r} is no duration. Write 7d, 12h, 30m or 45s.")
    seconds = float(found[1]) * UNITS[found[2] or "s"]
    if seconds > MAX_SECONDS:
        raise ValueError(f"{text!r} is more than a hundred years.")
    return seconds


def number(n: int) -> str:
    """Return a whole number with separators between thousands."""
    # Most numbers are small, and a dashboard has hundreds of them.
    return str(n) if abs(n) < 1_000 else number_format(n, use_l10n=True, force_grouping=True)


def percent(share: float | None) -> str:
    """Return a share of 0 to 1 in percent; a dash if there is none."""
    if share is None:
        return "–"
    if 0 < share < 0.001:
        return _("<%(percent)s %%") % {"percent": number_format(0.1, 1)}
    digits = 0 if share in (0, 1) else 1
    return _("%(percent)s %%") % {"percent": number_format(share * 100, digits)}


def duration(seconds: float | None) -> str:
    """Return a duration in one or two units; a dash if there is none."""
    if seconds is None:
        return "–"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return _seconds(0)
    for limit, show in _SCALES:
        if seconds < limit:
            return show(seconds)
    return _days(seconds)


def whole_seconds(seconds: float) -> float:
    """Return a duration in whole seconds, of which `duration` shows no fraction."""
    return float(round(seconds))


def _microseconds(seconds: float) -> str:
    return _("%(n)s µs") % {"n": round(seconds * 1_000_000)}


def _milliseconds(seconds: float) -> str:
    digits = 1 if seconds < 0.01 else 0
    return _("%(n)s ms") % {"n": _rounded(seconds * 1_000, digits)}


def _seconds(seconds: float) -> str:
    digits = 1 if seconds < 9.95 and seconds != int(seconds) else 0
    return _("%(n)s s") % {"n": _rounded(seconds, digits)}


def _rounded(n: float, digits: int) -> str:
    # Django's function would cut digits off without rounding.
    return number_format(round(n, digits), digits)


def _minutes(seconds: float) -> str:
    n, rest = divmod(round(seconds), MINUTE)
    if n >= 10 or not rest:
        return _("%(n)s min") % {"n": n}
    return _("%(n)s min %(rest)s s") % {"n": n, "rest": rest}


def _hours(seconds: float) -> str:
    n, rest = divmod(round(seconds) // MINUTE, 60)
    if not rest:
        return _("%(n)s h") % {"n": n}
    return _("%(n)s h %(rest)s min") % {"n": n, "rest": rest}


def _days(seconds: float) -> str:
    n, rest = divmod(round(seconds) // HOUR, 24)
    if n >= 10 or not rest:
        return _("%(n)s d") % {"n": number(n)}
    return _("%(n)s d %(rest)s h") % {"n": n, "rest": rest}


_SCALES: Final = (
    (0.001, _microseconds),
    (0.9995, _milliseconds),
    (59.5, _seconds),
    (HOUR - 0.5, _minutes),
    (DAY - 0.5, _hours),
)
