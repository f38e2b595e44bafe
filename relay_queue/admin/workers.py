"""Workers: the list of processes, those that have stopped included, and the page of one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue.admin import clock, formatting, sight
from relay_queue.admin.actions.catalogue import WORKER_ACTIONS, Action
from relay_queue.admin.actions.pages import Actions
from relay_queue.admin.dashboard import charts, panels
from relay_queue.admin.dashboard.links import Links, linked
from relay_queue.admin.dashboard.panels import worker_badge
from relay_queue.admin.formatting import Fact, seconds_since
from relay_queue.admin.lists import names
from relay_queue.admin.lists.filters import PresenceFilter
from relay_queue.admin.reading import DetailAdmin
from relay_queue.models import Lease, Worker
from relay_queue.quantities import duration, number, percent, whole_seconds
from relay_queue.query import history, status
from relay_queue.query.history import RecentStats
from relay_queue.states import WorkerOrder

COUNTED: Final = frozenset({"ran_well", "ran_badly", "came_late"})
"""Columns with numbers of attempts, of jobs that this person may not see, too."""

MOST_OPEN: Final = 100
MOST_ENDED: Final = 20


class StoppedFilter(PresenceFilter):
    """Filters by whether the end of the worker is recorded."""

    title = gettext_lazy("stopped")
    parameter_name = "stopped"
    field = "stopped_at"
    present = gettext_lazy("Stopped")
    absent = gettext_lazy("Running")


class WorkerActions(Actions):
    """Adds the actions on workers to their list and to the page of a worker."""

    row_actions: ClassVar[tuple[Action, ...]] = WORKER_ACTIONS
    actions_model = Worker


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One lease in a table: its job, its outcome, and how long it took or has taken."""

    job: SafeString
    task: SafeString
    queue: SafeString
    attempt: int
    outcome: SafeString
    lasted: SafeString
    ended: SafeString
    expires: SafeString
    error: SafeString


@admin.register(Worker)
class WorkerAdmin(WorkerActions, DetailAdmin):
    """Worker processes, the newest first."""

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
    list_filter = (StoppedFilter,)
    search_fields = ("name", "host")
    search_help_text = gettext_lazy("A part of the name or of the host")
    ordering = ("-id",)
    change_form_template = "admin/relay_queue/worker.html"

    def detail(self, request: HttpRequest, shown: Worker) -> Mapping[str, object]:
        """Return the title and the facts of the page of one worker."""
        links = Links(request, self.admin_site)
        title = _("Worker %(name)s") % {"name": shown.name}
        return {"title": title, **_context(request, shown, links)}

    def get_list_display(self, request: HttpRequest) -> Any:
        """Leave out the numbers of attempts where they count jobs that this person may not see."""
        shown = super().get_list_display(request)
        if sight.counters_tell(request, self.admin_site, Worker):
            return shown
        return [column for column in shown if column not in COUNTED]

    @admin.display(description=gettext_lazy("process"))
    def place(self, worker: Worker) -> str:
        """Show the host and the process id."""
        return _("%(host)s, pid %(pid)s") % {"host": worker.host, "pid": worker.pid}

    @admin.display(description=gettext_lazy("state"))
    def state(self, worker: Any) -> SafeString:
        """Show whether it is alive, quiet, stopping, stopped or silent."""
        return worker_badge(worker, seconds_since(worker.heartbeat_at, worker.now))

    @admin.display(description=gettext_lazy("slots"))
    def slots(self, worker: Worker) -> SafeString:
        """Show how many jobs it runs at once."""
        return formatting.count(gettext_lazy("slots"), worker.concurrency)

    @admin.display(description=gettext_lazy("heartbeat"))
    def heartbeat(self, worker: Any) -> SafeString:
        """Show how long ago it last wrote its heartbeat."""
        return formatting.labelled(
            gettext_lazy("heartbeat"), formatting.ago(worker.heartbeat_at, worker.now)
        )

    @admin.display(description=gettext_lazy("started"))
    def began(self, worker: Any) -> SafeString:
        """Show how long ago the process started."""
        return formatting.labelled(
            gettext_lazy("started"), formatting.ago(worker.started_at, worker.now)
        )

    @admin.display(description=gettext_lazy("succeeded"))
    def ran_well(self, worker: Worker) -> SafeString:
        """Show how many of its attempts succeeded since it started."""
        return formatting.count(gettext_lazy("succeeded"), worker.succeeded)

    @admin.display(description=gettext_lazy("failed"))
    def ran_badly(self, worker: Worker) -> SafeString:
        """Show how many of its attempts failed since it started."""
        return formatting.count(gettext_lazy("failed"), worker.failed)

    @admin.display(description=gettext_lazy("refused"))
    def came_late(self, worker: Worker) -> SafeString:
        """Show how many of its outcomes were refused because the lease was gone."""
        return formatting.count(gettext_lazy("refused"), worker.refused)


def _context(request: HttpRequest, worker: Worker, links: Links) -> dict[str, Any]:
    """Return what the template of the page needs."""
    now = clock.now(request)
    return {
        "worker": worker,
        "badge": panels.worker_badge(worker, seconds_since(worker.heartbeat_at, now)),
        "order": _order(worker, now),
        "facts": _facts(worker, now),
        **_done(request, worker, now, links),
        "attempts_url": links.attempts_of(worker.pk),
        **_leases(request, worker, now, links),
    }


def _done(request: HttpRequest, worker: Worker, now: datetime, links: Links) -> dict[str, Any]:
    """Return the queues and totals of a worker, for those who may see all jobs that these count."""
    queues, excluded = status.queues_of(worker), status.excluded_by(worker)
    if not sight.counters_tell(request, links.site, Worker):
        seen = names.shown(request, links.site).queues
        return {
            "may_see_counts": False,
            "serves": _linked(seen, queues, links) if queues else [],
            "excludes": _linked(seen, excluded, links) if excluded else [],
        }
    hour = history.recent(now, worker_id=worker.pk)
    return {
        "may_see_counts": True,
        "serves": _linked(queues, queues, links),
        "excludes": _linked(excluded, excluded, links),
        "totals": _totals(worker, hour),
        "chart": charts.throughput(
            "hour", _("Last hour, by minute"), hour.spans, timedelta(minutes=1)
        ),
    }


def _linked(seen: list[str], queues: list[str], links: Links) -> list[SafeString]:
    """Return the queues that may be seen, each with its page, and dots for the others."""
    shown = [linked(name, links.queue(name)) for name in queues if name in set(seen)]
    return shown if len(shown) == len(queues) else [*shown, linked("…", "")]


def _leases(request: HttpRequest, worker: Worker, now: datetime, links: Links) -> dict[str, Any]:
    """Return its open leases and the last that ended, for those who may view leases."""
    if not sight.may_view(request, links.site, Lease):
        return {"may_see_leases": False}
    leases = _seen_leases(request, links.site)
    held = leases.filter(worker=worker.pk, ended_at__isnull=True)
    found = sorted(held.order_by("expires_at")[: MOST_OPEN + 1], key=lambda each: each.acquired_at)
    ended = _in_order(leases, status.recent_leases(worker, MOST_ENDED))
    return {
        "may_see_leases": True,
        "held": _attempt_rows(found[:MOST_OPEN], now, links),
        "held_more": len(found) > MOST_OPEN,
        "held_url": links.held_by(worker.pk),
        "slots": panels.slots_meter(min(len(found), MOST_OPEN), worker.concurrency),
        "ended": _attempt_rows(ended, now, links),
    }


def _order(worker: Worker, now: datetime) -> SafeString | str:
    """Return the order of an operator and its age; empty once the worker has stopped."""
    if not worker.ordered or worker.stopped_at is not None:
        return ""
    texts = {
        WorkerOrder.QUIET: _("Told to be quiet: it claims nothing more."),
        WorkerOrder.STOP: _("Told to stop: it finishes what runs, and ends."),
    }
    text = texts.get(WorkerOrder(worker.ordered), "") if worker.ordered in texts else worker.ordered
    when = (
        "" if worker.ordered_at is None else formatting.age(seconds_since(worker.ordered_at, now))
    )
    return f"{text} ({when})" if when else str(text)


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
            % {
                "succeeded": number(lately.succeeded),
                "failed": number(lately.failed),
            },
        ),
        *(
            Fact(format_lazy("{} {}", _("Run"), name), value)
            for name, value in panels.percentiles(hour.run)[:2]
        ),
    ]


def _in_order(found: QuerySet[Lease], pks: Sequence[int]) -> list[Lease]:
    """Return the leases among ``found`` with these ids, in the order of the ids."""
    by_id = found.in_bulk(pks)
    return [by_id[pk] for pk in pks if pk in by_id]


def _seen_leases(request: HttpRequest, site: AdminSite) -> QuerySet[Lease]:
    """Return the leases that a viewer may see, with their jobs, without large columns."""
    rows = sight.leases(request, site).select_related("job")
    return rows.defer("traceback", "job__payload", "job__result")


def _attempt_rows(found: Sequence[Lease], now: datetime, links: Links) -> list[AttemptRow]:
    """Return the rows of a table of leases."""
    return [_attempt_row(lease, now, links) for lease in found]


def _attempt_row(lease: Any, now: datetime, links: Links) -> AttemptRow:
    return AttemptRow(
        job=linked(lease.job_id, links.job(lease.job_id)),
        task=formatting.task(lease.job),
        queue=linked(lease.job.queue, links.queue(lease.job.queue)),
        attempt=lease.attempt,
        outcome=formatting.outcome_badge(lease.outcome),
        lasted=formatting.ran(lease, now),
        ended=formatting.ago(lease.ended_at, now),
        expires=formatting.due(lease.expires_at, now),
        error=formatting.error(lease.error),
    )
