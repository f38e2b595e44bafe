"""How the console shows states, outcomes, times, jobs, leases and workers, the same on every page.

A state or an outcome is a badge: a word with an icon, so that colour is never the only sign. Pages
that show badges load ``relay_queue/tokens.css``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, Final

from django.contrib import admin
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue.models import Job
from relay_queue.quantities import duration, number, whole_seconds
from relay_queue.query.ledger import shown_token
from relay_queue.ranking import effective_priority
from relay_queue.states import Outcome, State
from relay_queue.verdict import Verdict

CHECK: Final = "M3 8.5 6.5 12 13 4.5"
CLOCK: Final = "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M8 4.8V8l2.2 1.6"
CROSS: Final = "m4 4 8 8m0-8-8 8"
LINES: Final = "M3 4h10M3 8h10M3 12h6"
LOOP: Final = "M13 8a5 5 0 1 1-1.5-3.6M13 2v3.2H9.8"
PLAY: Final = "M5 3v10l8-5z"
SLASHED: Final = "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M3.8 3.8l8.4 8.4"
WARNING: Final = "M8 2v7.5M8 13.5v.1"
BROKEN: Final = "M2 8h4m4 0h4M6 4.5v7m4-7v7"
BACK: Final = "M6.5 3.5 2.5 7.5l4 4M2.5 7.5H10a3.5 3.5 0 0 1 0 6"
MOON: Final = "M13 9.5A5.6 5.6 0 0 1 6.5 3 5.6 5.6 0 1 0 13 9.5z"
PAUSE: Final = "M5.5 3.5v9m5-9v9"

ICONS: Final[dict[str, str]] = {
    State.SCHEDULED: CLOCK,
    State.READY: LINES,
    State.RUNNING: PLAY,
    State.RETRYING: LOOP,
    State.SUCCEEDED: CHECK,
    State.DEAD: CROSS,
    State.CANCELLED: SLASHED,
    Outcome.ACKED: CHECK,
    Outcome.FAILED: WARNING,
    Outcome.FATAL: CROSS,
    Outcome.TIMED_OUT: CLOCK,
    Outcome.EXPIRED: CLOCK,
    Outcome.LOST: BROKEN,
    Outcome.RELEASED: BACK,
    Outcome.UNRUN: BACK,
    Outcome.SNOOZED: MOON,
}
"""Icons as paths on a grid of 16, drawn as lines. A cancelled job and lease have the same icon."""

MOST_ERROR_CHARS: Final = 90

VERDICTS: Final[dict[str, tuple[str, Any, str]]] = {
    Verdict.NEVER_STARTED: ("unknown", gettext_lazy("Never started"), SLASHED),
    Verdict.RUNNING: ("running", gettext_lazy("Running"), PLAY),
    Verdict.RAN_ONCE: ("acked", gettext_lazy("Ran once"), CHECK),
    Verdict.INTERRUPTED: ("lost", gettext_lazy("Effect unknown"), BROKEN),
    Verdict.RAN_AGAIN: ("snoozed", gettext_lazy("Ran again"), LOOP),
}
"""The badge of each verdict. Its text is short, for a column; `Verdict` has the full texts."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and its value, as the pages of one job, one queue and one worker list them."""

    name: Any
    value: Any


Column = Callable[[Any, Any], Any]
"""A method of a page that shows a part of a row in its list."""


def column(heading: Any, show: Callable[[Any], Any]) -> Column:
    """Return a column of a list: its heading, and what it shows of a row."""

    @admin.display(description=heading)
    def shown(page: Any, row: Any) -> Any:
        return show(row)

    return shown


def named_column(heading: Any, show: Callable[[Any], str]) -> Column:
    """Return a column whose heading is repeated in each row, for narrow screens without headings."""
    return column(heading, lambda row: labelled(heading, show(row)))


def number_column(heading: Any, field: str) -> Column:
    """Return a column with the number in a field; a dash for none."""
    read = attrgetter(field)
    return column(heading, lambda row: count(heading, read(row)))


def age_column(heading: Any, field: str) -> Column:
    """Return a column with how long ago the time in a field was; a dash for none."""
    read = attrgetter(field)
    return named_column(heading, lambda row: ago(read(row), row.now))


def state_badge(state: str) -> SafeString:
    """Return the badge of a job's state. An unknown state is shown as it is."""
    if state not in State.values:
        return badge("unknown", state, WARNING)
    return badge(state, State(state).label, ICONS[state])


def outcome_badge(outcome: str | None) -> SafeString:
    """Return the badge of how a lease ended; None is a lease that is still open."""
    if outcome is None:
        return badge("open", _("Open"), PLAY)
    if outcome not in Outcome.values:
        return badge("unknown", outcome, WARNING)
    return badge(outcome, Outcome(outcome).label, ICONS[outcome])


def badge(kind: str, text: object, path: str) -> SafeString:
    """Return a badge of a kind that ``tokens.css`` knows, with a text and the path of its icon."""
    return format_html(
        '<span class="relay-badge relay-badge--{}">{}{}</span>', kind, icon(path), text
    )


def icon(path: str) -> SafeString:
    """Return a path of this module as a picture that screen readers pass over."""
    return format_html(
        '<svg viewBox="0 0 16 16" aria-hidden="true" focusable="false"><path d="{}"/></svg>', path
    )


def verdict_badge(verdict: str, *, short: bool = True) -> SafeString:
    """Return the badge of a verdict."""
    kind, text, path = VERDICTS[verdict]
    return badge(kind, text if short else str(Verdict(verdict).label).capitalize(), path)


def task(job: Job, error: str = "") -> SafeString:
    """Show the name of a task, its module below, and the last error of the job.

    The module tells two tasks of one name apart.
    """
    path, _dot, name = job.task.rpartition(".")
    shown = format_html('<i class="relay-error" title="{}">{}</i>', error, _cut(error))
    return format_html(
        '<span class="relay-task" title="{}"><b>{}</b><small>{}</small>{}</span>',
        job.task,
        name,
        path,
        shown if error else "",
    )


def attempts(job: Job) -> SafeString:
    """Show the charged attempts of the present budget, and the budget."""
    return labelled(_("attempts"), f"{job.attempt - job.attempt_base} / {job.max_attempts}")


def count(label: Any, n: int | None) -> SafeString:
    """Show a number, with what it counts where there is no heading above it; a dash for none."""
    return labelled(label, dash() if n is None else number(n))


def labelled(label: Any, shown: str) -> SafeString:
    """Show something, with its name where there is no heading above it."""
    return format_html(
        '<span class="relay-number"><span class="relay-label">{}</span>{}</span>', label, shown
    )


def priority(job: Any, now: datetime) -> SafeString:
    """Show the priority, and for a job that waits its turn what it has grown to by waiting."""
    if job.state != State.READY or job.aging_seconds is None:
        return labelled(_("priority"), str(job.priority))
    grown = effective_priority(job.priority, job.available_at, job.aging_seconds, now)
    return format_html(
        '<span class="relay-number" title="{}"><span class="relay-label">{}</span>{}'
        ' <span class="relay-quiet">→ {}</span></span>',
        _("Set to %(set)s; %(grown).1f by its waiting time")
        % {"set": job.priority, "grown": grown},
        _("priority"),
        job.priority,
        f"{grown:.1f}" if grown < 100 else f"{grown:,.0f}",
    )


def when(job: Job, now: datetime) -> SafeString:
    """Show the time that matters in the state of a job: since when, or in how long."""
    if job.state in {State.SCHEDULED, State.RETRYING}:
        return due(job.available_at, now)
    if job.finished_at is not None:
        return ago(job.finished_at, now)
    if job.state == State.READY:
        text = _("waits %(time)s") % {"time": passed(job.available_at, now)}
        return moment(job.available_at, text)
    lease = getattr(job, "newest_lease", None)
    return ago(lease.acquired_at if lease else job.available_at, now)


def moment(when: datetime, text: str = "") -> SafeString:
    """Return a time as an element that tells programs and a hovering pointer the exact time.

    ``text`` is shown in its place, such as the time that has passed since.
    """
    exact = f"{timezone.localtime(when):%Y-%m-%d %H:%M:%S %Z}"
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', when.isoformat(), exact, text or exact
    )


def clock_time(when: datetime) -> str:
    """Return hours and minutes in the reader's time zone."""
    return f"{timezone.localtime(when):%H:%M}"


def age(seconds: float) -> str:
    """Return how long ago something was, in whole seconds or larger units."""
    if seconds < 1:
        return _("under 1 s ago")
    return _("%(time)s ago") % {"time": duration(whole_seconds(seconds))}


def seconds_since(when: datetime, now: datetime) -> float:
    """Return the seconds between a time and now; 0 for a time that is still to come."""
    return max(0.0, (now - when).total_seconds())


def passed(since: datetime, now: datetime) -> str:
    """Return the time between a time and now, in whole seconds or larger units."""
    return duration(whole_seconds(seconds_since(since, now)))


def due(at: datetime, now: datetime) -> SafeString:
    """Show in how long something is due, or for how long it has been overdue."""
    left = (at - now).total_seconds()
    shown = duration(whole_seconds(abs(left)))
    text = _("in %(time)s") if left >= 0 else _("overdue by %(time)s")
    return moment(at, text % {"time": shown})


def ago(at: datetime | None, now: datetime) -> SafeString:
    """Show how long ago something was; a dash for something that has not been."""
    if at is None:
        return dash()
    return moment(at, age(seconds_since(at, now)))


def ran(lease: Any, now: datetime) -> SafeString:
    """Show how long an attempt took, or how long it has been running."""
    if lease is None:
        return dash()
    seconds = ((lease.ended_at or now) - lease.acquired_at).total_seconds()
    goes_on = " …" if lease.ended_at is None else ""
    return format_html("{}{}", duration(max(0.0, seconds)), goes_on)


def error(text: str) -> SafeString:
    """Show the beginning of an error, the whole of it on hover."""
    if not text:
        return dash()
    return format_html('<span class="relay-error" title="{}">{}</span>', text, _cut(text))


def attempt(lease: Any, now: datetime) -> SafeString:
    """Show how long an attempt took, and who had it below."""
    if lease is None:
        return dash()
    return format_html(
        '<span class="relay-two">{}<small>{}</small></span>', ran(lease, now), worker(lease)
    )


def worker(lease: Any) -> str:
    """Name the worker of a lease: by its number if its row is gone, or is not to be shown."""
    if lease.worker_id is None:
        return "–"
    return str(lease.shown_worker.name) if lease.shown_worker else f"#{lease.worker_id}"


def late_return(lease: Any) -> SafeString:
    """Show the verb of a late return, and why the guard refused it; a dash if there was none."""
    if lease.refused_at is None:
        return dash()
    return badge("refused", f"{lease.refused_verb}: {lease.refused_reason}", WARNING)


def token(whole: str) -> str:
    """Show enough of a token to recognise it."""
    return f"{shown_token(whole)}…"


def dash() -> SafeString:
    """Show a dash, which stands for a missing value."""
    return format_html('<span class="relay-quiet">{}</span>', "–")


def _cut(text: str) -> str:
    return text if len(text) <= MOST_ERROR_CHARS else f"{text[: MOST_ERROR_CHARS - 1]}…"
