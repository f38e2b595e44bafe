"""Charts: the geometry of the pictures, as texts for an SVG template. No script draws data.

Heights are in pixels and widths in units of one bar. The pictures stretch with the page, which
would distort text, so the labels of the scale are in a picture of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from django.utils.html import escape, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from relay_queue.admin.formatting import clock_time, moment
from relay_queue.quantities import duration, number
from relay_queue.query.history import Bucket, Histogram, total, upper_seconds

HEIGHT: Final = 120
LEAST_HEIGHT: Final = 2.0
"""The height of the smallest bar, so that a small number beside large ones can be seen."""

LEAST_SLOTS: Final = 12
"""The fewest buckets of a histogram: three bars alone would look like blocks."""

BAR: Final = 10
GAP: Final = 2


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across a chart, with its value."""

    y: str
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with its scales, and a table of the same numbers.

    ``columns`` is one piece of SVG for each step, empty where nothing was done. A template would
    take longer to draw them than all queries of the page.
    """

    key: str
    title: str
    summary: str
    columns: list[str]
    marks: list[Mark]
    below: list[str | SafeString]
    headings: list[str]
    rows: list[list[str | SafeString]]
    height: int = HEIGHT

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(self.columns)

    @property
    def width(self) -> int:
        """The width of the picture."""
        return len(self.columns) * BAR

    @property
    def bars(self) -> SafeString:
        """All columns."""
        return mark_safe("".join(self.columns))

    @property
    def body(self) -> SafeString:
        """The rows of the table."""
        cells = '<td class="relay-n">{}</td>' * (len(self.headings) - 1)
        return format_html_join("", f'<tr><th scope="row">{{}}</th>{cells}</tr>', self.rows)


def last_hour(spans: Sequence[Bucket]) -> Chart:
    """Draw the throughput of the last hour."""
    return throughput("hour", _("Last hour, by minute"), spans, timedelta(minutes=1))


def throughput(key: str, title: str, spans: Sequence[Bucket], step: timedelta) -> Chart:
    """Draw successes upwards and failures downwards, one column for each span."""
    up = nice(max((span.tally.succeeded for span in spans), default=0))
    most_failed = max((span.tally.failed for span in spans), default=0)
    down = max(nice(most_failed), up / 8) if most_failed else 0
    scale = HEIGHT / ((up + down) or 1)
    zero = up * scale
    done = total(spans)
    marks = [Mark(_px(0), number(up))] if up else []
    marks.append(Mark(_px(zero), "0"))
    if most_failed and down * scale > 24:
        marks.append(Mark(_px(HEIGHT), number(int(down))))
    return Chart(
        key=key,
        title=title,
        summary=ngettext(
            "%(succeeded)s succeeded, %(failed)s attempt failed",
            "%(succeeded)s succeeded, %(failed)s attempts failed",
            done.failed,
        )
        % {"succeeded": number(done.succeeded), "failed": number(done.failed)},
        columns=[_throughput(at, span, zero, scale) for at, span in enumerate(spans)],
        marks=marks,
        below=_times(spans, step),
        headings=[_("From"), _("Succeeded"), _("Failed attempts"), _("Retried"), _("Died")],
        rows=[_throughput_row(span) for span in reversed(spans) if _has_any(span)],
    )


def durations(key: str, title: str, histogram: Histogram) -> Chart:
    """Draw how many durations fell into each bucket, the buckets doubling from left to right."""
    used = sorted(slot for slot, n in histogram.counts.items() if n)
    slots = _shown_slots(used)
    most = nice(max(histogram.counts.values(), default=0))
    scale = HEIGHT / (most or 1)
    columns = []
    for at, slot in enumerate(slots):
        n = histogram.counts.get(slot, 0)
        bar = _bar(at, "duration", HEIGHT, n * scale)
        columns.append(_column(at, f"{_bucket(slot)}: {number(n)}", bar))
    return Chart(
        key=key,
        title=title,
        summary=ngettext("%(n)s measured", "%(n)s measured", histogram.total)
        % {"n": number(histogram.total)},
        columns=columns,
        marks=[Mark(_px(0), number(most)), Mark(_px(HEIGHT), "0")] if used else [],
        below=[duration(upper_seconds(slots[at]) / 2) for at in (0, len(slots) // 2)]
        + [duration(upper_seconds(slots[-1]))],
        headings=[_("Took"), _("Times")],
        rows=[[_bucket(slot), number(histogram.counts[slot])] for slot in used],
    )


def nice(value: float) -> int:
    """Return the next round number, such as 3, 20 or 600: the end of a scale."""
    if value <= 0:
        return 0
    power = 1
    while True:
        for step in (1, 2, 3, 4, 5, 6, 8):
            if value <= step * power:
                return step * power
        power *= 10


def _throughput(at: int, span: Bucket, zero: float, scale: float) -> str:
    done, failed = span.tally.succeeded, span.tally.failed
    if not (done or failed):
        return ""  # most of a day's columns: a title for each would cost a tenth of the page
    title = _("%(time)s: %(succeeded)s succeeded, %(failed)s failed") % {
        "time": clock_time(span.start),
        "succeeded": number(done),
        "failed": number(failed),
    }
    up = _bar(at, "succeeded", zero, done * scale)
    return _column(at, title, up + _bar(at, "failed", zero, failed * scale, downwards=True))


def _throughput_row(span: Bucket) -> list[str | SafeString]:
    counts = (span.tally.succeeded, span.tally.failed, span.tally.retried, span.tally.died)
    return [moment(span.start, clock_time(span.start)), *(number(n) for n in counts)]


def _has_any(span: Bucket) -> bool:
    return bool(span.tally.ended or span.tally.died)


def _times(spans: Sequence[Bucket], step: timedelta) -> list[str | SafeString]:
    """Label the beginning, the middle and the end of a series."""
    first, middle = spans[0].start, spans[len(spans) // 2].start
    last = spans[-1].start + step
    return [moment(when, clock_time(when)) for when in (first, middle, last)]


def _shown_slots(used: list[int]) -> range:
    if not used:
        return range(10, 10 + LEAST_SLOTS)
    low, high = used[0], used[-1] + 1
    missing = max(0, LEAST_SLOTS - (high - low))
    low = max(0, low - missing // 2)
    return range(low, max(high, low + LEAST_SLOTS))


def _bucket(slot: int) -> str:
    upper = upper_seconds(slot)
    if slot < 2:
        return _("up to %(limit)s") % {"limit": duration(upper)}
    return _("%(from)s to %(to)s") % {"from": duration(upper / 2), "to": duration(upper)}


def _bar(at: int, kind: str, base: float, height: float, *, downwards: bool = False) -> str:
    """Draw a rectangle of a kind that the style sheet colours; nothing without a height."""
    if not height:
        return ""
    height = max(height, LEAST_HEIGHT)
    return (
        f'<rect class="relay-bar relay-bar--{kind}" x="{at * BAR + GAP // 2}"'
        f' y="{_px(base if downwards else base - height)}"'
        f' width="{BAR - GAP}" height="{_px(height)}"/>'
    )


def _column(at: int, title: str, bars: str) -> str:
    """Draw the bars of one step, with the title that a hovering pointer shows."""
    if not bars:
        return ""
    hit = f'<rect class="relay-hit" x="{at * BAR}" y="0" width="{BAR}" height="{HEIGHT}"/>'
    return f"<g><title>{escape(title)}</title>{hit}{bars}</g>"


def _px(value: float) -> str:
    # Never localised: a comma in a number is two numbers to SVG.
    return f"{value:.1f}"
