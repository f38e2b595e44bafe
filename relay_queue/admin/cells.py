"""What the lists of jobs show in their columns, the same in each of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue.admin import badges, words
from relay_queue.models import Job
from relay_queue.ranking import effective_priority
from relay_queue.states import State
from relay_queue.verdict import Verdict

MOST_ERROR_CHARS: Final = 90
TOKEN_CHARS: Final = 6
"""Shown of a token. Whoever knows the whole of it can settle the job."""

VERDICT_ICONS: Final[dict[str, str]] = {
    Verdict.NEVER_STARTED: badges.SLASHED,
    Verdict.RUNNING: badges.PLAY,
    Verdict.RAN_ONCE: badges.CHECK,
    Verdict.INTERRUPTED: badges.BROKEN,
    Verdict.RAN_AGAIN: badges.LOOP,
}
VERDICT_KINDS: Final[dict[str, str]] = {
    Verdict.NEVER_STARTED: "unknown",
    Verdict.RUNNING: "running",
    Verdict.RAN_ONCE: "acked",
    Verdict.INTERRUPTED: "lost",
    Verdict.RAN_AGAIN: "snoozed",
}
VERDICT_TEXTS: Final[dict[str, Any]] = {
    Verdict.NEVER_STARTED: gettext_lazy("Never started"),
    Verdict.RUNNING: gettext_lazy("Running"),
    Verdict.RAN_ONCE: gettext_lazy("Ran once"),
    Verdict.INTERRUPTED: gettext_lazy("Effect unknown"),
    Verdict.RAN_AGAIN: gettext_lazy("Ran again"),
}
"""Short, for a column; `Verdict` has the full words."""


def verdict_badge(verdict: str, *, short: bool = True) -> SafeString:
    """Return the badge of a verdict."""
    text = VERDICT_TEXTS[verdict] if short else str(Verdict(verdict).label).capitalize()
    return badges.badge(VERDICT_KINDS[verdict], text, VERDICT_ICONS[verdict])


def task(job: Job, error: str = "") -> SafeString:
    """Show the name of a task, its path below, which tells two of them apart, and the last error."""
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
    """Show how much of the budget is used."""
    return format_html(
        '<span class="relay-number"><span class="relay-label">{}</span>{} / {}</span>',
        _("attempts"),
        job.attempt - job.attempt_base,
        job.max_attempts,
    )


def count(label: Any, n: int | None) -> SafeString:
    """Show a number, with what it counts where there is no heading above it; a dash for none."""
    return labelled(label, dash() if n is None else words.number(n))


def labelled(label: Any, shown: str) -> SafeString:
    """Show something, with its name where there is no heading above it."""
    return format_html(
        '<span class="relay-number"><span class="relay-label">{}</span>{}</span>', label, shown
    )


def priority(job: Any, now: datetime) -> SafeString:
    """Show the priority, and for a job that waits its turn what it has grown to by waiting."""
    if job.state != State.READY or job.aging_seconds is None:
        return format_html(
            '<span class="relay-number"><span class="relay-label">{}</span>{}</span>',
            _("priority"),
            job.priority,
        )
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
        text = _("waits %(time)s") % {"time": _passed(job.available_at, now)}
        return words.moment(job.available_at, text)
    lease = getattr(job, "newest_lease", None)
    return ago(lease.acquired_at if lease else job.available_at, now)


def due(moment: datetime, now: datetime) -> SafeString:
    """Show in how long something is due."""
    left = (moment - now).total_seconds()
    shown = words.duration(words.whole(abs(left)))
    text = _("in %(time)s") if left >= 0 else _("overdue by %(time)s")
    return words.moment(moment, text % {"time": shown})


def ago(moment: datetime | None, now: datetime) -> SafeString:
    """Show how long ago something was; a dash if it was not."""
    if moment is None:
        return dash()
    return words.moment(moment, words.age(max(0.0, (now - moment).total_seconds())))


def ran(lease: Any, now: datetime) -> SafeString:
    """Show how long an attempt took, or how long it has been running."""
    if lease is None:
        return dash()
    seconds = ((lease.ended_at or now) - lease.acquired_at).total_seconds()
    shown = words.duration(max(0.0, seconds))
    if lease.ended_at is None:
        return format_html("{} …", shown)
    return format_html("{}", shown)


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


def token(whole: str) -> str:
    """Show enough of a token to recognise it."""
    return f"{whole[:TOKEN_CHARS]}…"


def dash() -> SafeString:
    """Show that there is nothing."""
    return format_html('<span class="relay-quiet">{}</span>', "–")


def now() -> datetime:
    """Return the time to which a page counts."""
    return timezone.now()


def _cut(text: str) -> str:
    return text if len(text) <= MOST_ERROR_CHARS else f"{text[: MOST_ERROR_CHARS - 1]}…"


def _passed(moment: datetime, now: datetime) -> str:
    return words.duration(words.whole(max(0.0, (now - moment).total_seconds())))
