"""Numbers, durations and times as people read them, in their language and time zone."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from django.utils import timezone
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

MINUTE: Final = 60
HOUR: Final = 3_600
DAY: Final = 86_400


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
    for limit, show in _SCALES:
        if seconds < limit:
            return show(seconds)
    return _days(seconds)


def age(seconds: float) -> str:
    """Return how long ago something was, without digits that nobody needs."""
    if seconds < 1:
        return _("under 1 s ago")
    return _("%(time)s ago") % {"time": duration(whole(seconds))}


def whole(seconds: float) -> float:
    """Return a duration in whole seconds, of which `duration` shows no fraction."""
    return float(round(seconds))


def moment(when: datetime, text: str = "") -> SafeString:
    """Return a time as an element that tells machines and a hovering pointer exactly when it is.

    ``text`` is shown in its place, such as the time that has passed since.
    """
    exact = f"{timezone.localtime(when):%Y-%m-%d %H:%M:%S %Z}"
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', when.isoformat(), exact, text or exact
    )


def clock_time(when: datetime) -> str:
    """Return hours and minutes in the reader's time zone."""
    return f"{timezone.localtime(when):%H:%M}"


def _microseconds(seconds: float) -> str:
    return _("%(n)s µs") % {"n": round(seconds * 1_000_000)}


def _milliseconds(seconds: float) -> str:
    digits = 1 if seconds < 0.01 else 0
    return _("%(n)s ms") % {"n": number_format(seconds * 1_000, digits)}


def _seconds(seconds: float) -> str:
    digits = 1 if seconds < 9.95 and seconds != int(seconds) else 0
    return _("%(n)s s") % {"n": number_format(seconds, digits)}


def _minutes(seconds: float) -> str:
    n, rest = divmod(round(seconds), MINUTE)
    if n >= 10 or not rest:
        return _("%(n)s min") % {"n": n}
    return _("%(n)s min %(rest)s s") % {"n": n, "rest": rest}


def _hours(seconds: float) -> str:
    n, rest = divmod(int(seconds) // MINUTE, 60)
    if not rest:
        return _("%(n)s h") % {"n": n}
    return _("%(n)s h %(rest)s min") % {"n": n, "rest": rest}


def _days(seconds: float) -> str:
    n, rest = divmod(int(seconds) // HOUR, 24)
    if n >= 10 or not rest:
        return _("%(n)s d") % {"n": number(n)}
    return _("%(n)s d %(rest)s h") % {"n": n, "rest": rest}


_SCALES: Final = (
    (0.001, _microseconds),
    (0.9995, _milliseconds),
    (59.5, _seconds),
    (HOUR - 0.5, _minutes),
    (DAY, _hours),
)
