"""Workers: the list of processes, those that have stopped included, and the page of one worker."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue.admin import formatting, sight
from relay_queue.admin.actions.catalogue import WORKER_ACTIONS, Action
from relay_queue.admin.actions.pages import Actions
from relay_queue.admin.dashboard import charts, panels
from relay_queue.admin.dashboard.links import Links, linked
from relay_queue.admin.dashboard.panels import worker_badge
from relay_queue.admin.formatting import (
    Fact,
    age_column,
    column,
    number_column,
    seconds_since,
)
from relay_queue.admin.lists.filters import PresenceFilter
from relay_queue.admin.reading import DetailAdmin
from relay_queue.models import Lease, Worker
from relay_queue.quantities import duration, number, percent, whole_seconds
from relay_queue.query import history, status
from relay_queue.query.history import RecentStats
from relay_queue.states import WorkerOrder

MOST_OPEN: Final = 100
MOST_ENDED: Final = 20


class StoppedFilter(PresenceFilter):
    """Filters by whether the end of the worker is recorded."""

    title = gettext_lazy("stopped")
    parameter_name = "stopped"
    field = "stopped_at"
    present = gettext_lazy("Stopped")
    absent = gettext_lazy("Running")


@admin.register(Worker)
class WorkerAdmin(Actions, DetailAdmin):
    """Worker processes, the newest first."""

    row_actions: ClassVar[tuple[Action, ...]] = WORKER_ACTIONS
    actions_model = Worker

    list_display = (
        "name",
        "place",
        "state",
        "slots",
        "heartbeat",
        "began",
        "ran_well",
        "ran_badly",
        "came_late",
        "stop_reason",
    )
    counter_columns = frozenset({"ran_well", "ran_badly", "came_late"})
    list_filter = (StoppedFilter,)
    search_fields = ("name", "host")
    search_help_text = gettext_lazy("A part of the name or of the host")
    ordering = ("-id",)
    change_form_template = "admin/relay_queue/worker.html"

    def detail(self, request: HttpRequest, shown: Worker) -> Mapping[str, object]:
        """Return the title and the facts of the page of one worker."""
        links, now = Links(request, self.admin_site), sight.now(request)
        return {
            "title": _("Worker %(name)s") % {"name": shown.name},
            "worker": shown,
            "badge": panels.worker_badge(shown, seconds_since(shown.heartbeat_at, now)),
            "order": _order(shown, now),
            "facts": _facts(shown, now),
            **_done(request, shown, now, links),
            "attempts_url": links.attempts_of(shown.pk),
            **_leases(request, shown, now, links),
        }

    place = column(gettext_lazy("process"), panels.place)
    state = column(
        gettext_lazy("state"),
        lambda worker: worker_badge(worker, seconds_since(worker.heartbeat_at, worker.now)),
    )
    slots = number_column(gettext_lazy("slots"), "concurrency")
    heartbeat = age_column(gettext_lazy("heartbeat"), "heartbeat_at")
    began = age_column(gettext_lazy("started"), "started_at")
    ran_well = number_column(gettext_lazy("succeeded"), "succeeded")
    ran_badly = number_column(gettext_lazy("failed"), "failed")
    came_late = number_column(gettext_lazy("refused"), "refused")


def _done(request: HttpRequest, worker: Worker, now: datetime, links: Links) -> dict[str, Any]:
    """Return the queues and totals of a worker, for those who may see all jobs that these count."""
    queues, excluded = status.queues_of(worker), status.excluded_by(worker)
    may_see = sight.counters_tell(request, links.site, Worker)
    seen = [*queues, *excluded] if may_see else sight.names(request, links.site).queues
    shown: dict[str, Any] = {
        "may_see_counts": may_see,
        "serves": _linked(seen, queues, links),
        "excludes": _linked(seen, excluded, links),
    }
    if may_see:
        hour = history.recent(now, worker_id=worker.pk)
        shown |= {"totals": _totals(worker, hour), "chart": charts.last_hour(hour.spans)}
    return shown


def _linked(seen: list[str], queues: list[str], links: Links) -> list[SafeString]:
    """Return the queues that may be seen, each with its page, and dots for the others."""
    shown = [linked(name, links.queue(name)) for name in queues if name in set(seen)]
    return shown if len(shown) == len(queues) else [*shown, linked("…", "")]


def _leases(request: HttpRequest, worker: Worker, now: datetime, links: Links) -> dict[str, Any]:
    """Return its open leases and the last that ended, for those who may view leases."""
    if not sight.may_view(request, links.site, Lease):
        return {"may_see_leases": False}
    leases = sight.leases(request, links.site).select_related("job")
    leases = leases.defer("traceback", "job__payload", "job__result")
    held = leases.filter(worker=worker.pk, ended_at__isnull=True)
    found = sorted(held.order_by("expires_at")[: MOST_OPEN + 1], key=lambda each: each.acquired_at)
    recent = status.recent_leases(worker, MOST_ENDED)
    ended = leases.in_bulk(recent)
    return {
        "may_see_leases": True,
        "held": [_attempt_row(lease, now, links) for lease in found[:MOST_OPEN]],
        "held_more": len(found) > MOST_OPEN,
        "held_url": links.held_by(worker.pk),
        "slots": panels.slots_meter(min(len(found), MOST_OPEN), worker.concurrency),
        "ended": [_attempt_row(ended[pk], now, links) for pk in recent if pk in ended],
    }


def _order(worker: Worker, now: datetime) -> str:
    """Return the order of an operator and its age; empty once the worker has stopped."""
    if not worker.ordered or worker.stopped_at is not None:
        return ""
    texts = {
        WorkerOrder.QUIET.value: _("Told to be quiet: it claims nothing more."),
        WorkerOrder.STOP.value: _("Told to stop: it finishes what runs, and ends."),
    }
    text = texts.get(worker.ordered, worker.ordered)
    if worker.ordered_at is None:
        return text
    return f"{text} ({formatting.age(seconds_since(worker.ordered_at, now))})"


def _facts(worker: Worker, now: datetime) -> list[Fact]:
    facts = [
        Fact(_("Host"), worker.host),
        Fact(_("Process"), _("pid %(pid)s") % {"pid": worker.pid}),
        Fact(_("Slots"), number(worker.concurrency)),
        Fact(_("Started"), formatting.ago(worker.started_at, now)),
        Fact(_("Heartbeat"), formatting.ago(worker.heartbeat_at, now)),
    ]
    if worker.stopped_at is not None:
        facts.append(Fact(_("Ended"), formatting.ago(worker.stopped_at, now)))
        facts.append(Fact(_("Why"), worker.stop_reason or "–"))
        served = seconds_since(worker.started_at, worker.stopped_at)
        facts.append(Fact(_("Served for"), duration(whole_seconds(served))))
    facts.append(Fact(_("Id"), worker.pk))
    return facts


def _totals(worker: Worker, hour: RecentStats) -> list[Fact]:
    ended = worker.succeeded + worker.failed
    share = worker.failed / ended if ended else None
    lately = history.total(hour.spans)
    return [
        Fact(_("Claimed"), number(worker.claimed)),
        Fact(_("Succeeded"), number(worker.succeeded)),
        Fact(_("Failed"), f"{number(worker.failed)} ({percent(share)})"),
        Fact(_("Refused"), number(worker.refused)),
        Fact(
            _("In the last hour"),
            _("%(succeeded)s succeeded, %(failed)s failed")
            % {"succeeded": number(lately.succeeded), "failed": number(lately.failed)},
        ),
        *(
            Fact(format_lazy("{} {}", _("Run"), name), value)
            for name, value in panels.percentiles(hour.run)[:2]
        ),
    ]


def _attempt_row(lease: Any, now: datetime, links: Links) -> dict[str, Any]:
    """Return one row of a table of leases."""
    return {
        "job": linked(lease.job_id, links.job(lease.job_id)),
        "task": formatting.task(lease.job),
        "queue": linked(lease.job.queue, links.queue(lease.job.queue)),
        "attempt": lease.attempt,
        "outcome": formatting.outcome_badge(lease.outcome),
        "lasted": formatting.ran(lease, now),
        "ended": formatting.ago(lease.ended_at, now),
        "expires": formatting.due(lease.expires_at, now),
        "error": formatting.error(lease.error),
    }
