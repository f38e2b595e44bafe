"""Queues: the list with the jobs in each from the counters, and the page of one queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.contrib import admin
from django.db.models import OuterRef, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue.admin import clock, formatting, sight
from relay_queue.admin.actions.queues import QueueActions
from relay_queue.admin.dashboard import charts, panels
from relay_queue.admin.dashboard.links import Links, counted, linked
from relay_queue.admin.formatting import Fact
from relay_queue.admin.reading import DetailAdmin
from relay_queue.models import Job, Queue, QueueCount, Worker
from relay_queue.quantities import duration, number, percent
from relay_queue.query import history, status
from relay_queue.query.history import RecentStats
from relay_queue.query.status import LOOKED_AT_FOR_OLDEST, QueueStatus
from relay_queue.states import UNFINISHED, State

COUNTED: Final = frozenset({"unfinished", "ready", "running", "dead"})
"""Columns with numbers of jobs, from the counters."""

MOST_NEXT: Final = 5
NEXT_LOOKED_AT: Final = 100
"""Jobs next in line that are checked for those that a person may see."""
MOST_WORKERS: Final = 20
WORKERS_LOOKED_AT: Final = 500


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that is next in line for a claim."""

    job: SafeString
    task: SafeString
    priority: SafeString
    waits: SafeString


@admin.register(Queue)
class QueueAdmin(QueueActions, DetailAdmin):
    """Queues by name."""

    list_display = (
        "name",
        "claims",
        "unfinished",
        "ready",
        "running",
        "dead",
        "jobs_admitted",
        "leases_admitted",
        "aging",
    )
    search_fields = ("name",)
    change_form_template = "admin/relay_queue/queue.html"

    def detail(self, request: HttpRequest, shown: Queue) -> Mapping[str, object]:
        """Return the title and the facts of the page of one queue."""
        links = Links(request, self.admin_site)
        title = _("Queue %(name)s") % {"name": shown.pk}
        return {"title": title, **_context(request, shown, links)}

    def get_list_display(self, request: HttpRequest) -> Any:
        """Leave out the numbers of jobs where they count some that this person may not see."""
        shown = super().get_list_display(request)
        if sight.counters_tell(request, self.admin_site, Queue):
            return shown
        return [column for column in shown if column not in COUNTED]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Add the numbers of jobs from the counters, which are few rows and exact."""
        counted: QuerySet[Any] = (
            super()
            .get_queryset(request)
            .annotate(
                n_unfinished=_jobs(*UNFINISHED),
                n_ready=_jobs(State.READY),
                n_running=_jobs(State.RUNNING),
                n_dead=_jobs(State.DEAD),
            )
        )
        return counted

    @admin.display(description=gettext_lazy("unfinished"))
    def unfinished(self, queue: Any) -> SafeString:
        """Show how many jobs count against the capacity."""
        return formatting.count(gettext_lazy("unfinished"), queue.n_unfinished)

    @admin.display(description=gettext_lazy("ready"))
    def ready(self, queue: Any) -> SafeString:
        """Show how many jobs a worker could claim now."""
        return formatting.count(gettext_lazy("ready"), queue.n_ready)

    @admin.display(description=gettext_lazy("running"))
    def running(self, queue: Any) -> SafeString:
        """Show how many jobs have an open lease."""
        return formatting.count(gettext_lazy("running"), queue.n_running)

    @admin.display(description=gettext_lazy("dead letters"))
    def dead(self, queue: Any) -> SafeString:
        """Show how many dead letters an operator may requeue or discard."""
        return formatting.count(gettext_lazy("dead letters"), queue.n_dead)

    @admin.display(description=gettext_lazy("claims"))
    def claims(self, queue: Queue) -> SafeString:
        """Show whether the queue is open or paused."""
        return claims(queue)

    @admin.display(description=gettext_lazy("capacity"))
    def jobs_admitted(self, queue: Queue) -> SafeString:
        """Show how many unfinished jobs the queue admits; a dash without a limit."""
        return formatting.count(gettext_lazy("capacity"), queue.capacity)

    @admin.display(description=gettext_lazy("max running"))
    def leases_admitted(self, queue: Queue) -> SafeString:
        """Show how many of its jobs may run at once; a dash without a limit."""
        return formatting.count(gettext_lazy("max running"), queue.max_running)

    @admin.display(description=gettext_lazy("aging"))
    def aging(self, queue: Queue) -> SafeString:
        """Show after how long a wait a job gains one class of priority."""
        return formatting.labelled(gettext_lazy("aging"), duration(queue.aging_seconds))


def _jobs(*states: State) -> Coalesce:
    counted = QueueCount.objects.filter(queue=OuterRef("name"), state__in=states)
    total = counted.order_by().values("queue").annotate(total=Sum("n")).values("total")
    return Coalesce(Subquery(total), 0)


def _context(request: HttpRequest, queue: Queue, links: Links) -> dict[str, Any]:
    """Return what the template of the page needs."""
    now = clock.now(request)
    return {
        "queue": queue,
        "badge": claims(queue),
        **_standing(request, queue, now, links),
        **_next(request, queue, now, links),
        **_workers(request, queue, now, links),
    }


def _standing(request: HttpRequest, queue: Queue, now: datetime, links: Links) -> dict[str, Any]:
    """Return limits, depths and the last hour, for those who may see all counted jobs."""
    if not sight.counters_tell(request, links.site, Queue):
        limits = ((_("Capacity"), queue.capacity), (_("Max running"), queue.max_running))
        shown = [Fact(name, _("no limit") if n is None else number(n)) for name, n in limits]
        return {"may_see_counts": False, "facts": [*shown, *_settings(queue, now)]}
    found = status.queue_status(queue, now)
    hour = history.recent(now, queue=queue.pk)
    return {
        "may_see_counts": True,
        "capacity": panels.capacity_meter(found.unfinished, queue.capacity),
        "running": panels.running_meter(found.counts.get(State.RUNNING, 0), queue.max_running),
        "facts": [_oldest_wait(found), *_settings(queue, now)],
        "depths": [
            (formatting.state_badge(state), counted(found.counts.get(state, 0), address))
            for state in State
            for address in [links.jobs(state, queue.pk)]
        ],
        "pieces": panels.pieces(found),
        "lately": _lately(hour),
        "chart": charts.throughput(
            "hour", _("Last hour, by minute"), hour.spans, timedelta(minutes=1)
        ),
    }


def claims(queue: Queue) -> SafeString:
    """Return the badge of whether workers claim from a queue."""
    if queue.paused_at is None:
        return formatting.badge("running", _("Open"), formatting.PLAY)
    return formatting.badge("paused", _("Paused"), formatting.PAUSE)


def _oldest_wait(found: QueueStatus) -> Fact:
    waited = duration(found.oldest_wait_seconds)
    if found.counts.get(State.READY, 0) > LOOKED_AT_FOR_OLDEST:
        waited = f"≥ {waited}"
    return Fact(_("Oldest wait"), waited)


def _settings(queue: Queue, now: datetime) -> list[Fact]:
    aging = _("none: strict priority")
    if queue.aging_seconds is not None:
        aging = _("one class in %(time)s") % {"time": duration(queue.aging_seconds)}
    facts = [Fact(_("Aging"), aging)]
    if queue.paused_at is not None:
        facts.append(Fact(_("Paused"), formatting.ago(queue.paused_at, now)))
    return [*facts, Fact(_("Created"), formatting.ago(queue.created_at, now))]


def _lately(hour: RecentStats) -> list[Fact]:
    done = history.total(hour.spans)
    facts = [
        Fact(_("Succeeded"), number(done.succeeded)),
        Fact(_("Failed attempts"), f"{number(done.failed)} ({percent(done.failure_rate)})"),
        Fact(_("Retried"), number(done.retried)),
        Fact(_("Died"), number(done.died)),
    ]
    for name, histogram in ((_("Wait"), hour.wait), (_("Run"), hour.run)):
        shown = " · ".join(" ".join(pair) for pair in panels.percentiles(histogram)[:2])
        facts.append(Fact(name, shown if histogram.total else "–"))
    return facts


def _next(request: HttpRequest, queue: Queue, now: datetime, links: Links) -> dict[str, Any]:
    """Return the jobs next in line, for those who may view jobs."""
    if not sight.may_view(request, links.site, Job):
        return {"may_see_jobs": False}
    pks = status.next_in_line(queue.pk, NEXT_LOOKED_AT)
    jobs = sight.jobs(request, links.site).defer("payload", "result")
    if not sight.limits_jobs(request, links.site):
        pks = pks[:MOST_NEXT]
    seen = jobs.in_bulk(pks)
    found: list[Any] = [seen[pk] for pk in pks if pk in seen][:MOST_NEXT]
    for job in found:
        job.aging_seconds = queue.aging_seconds
    return {
        "may_see_jobs": True,
        "next": [
            Waiting(
                job=linked(job.pk, links.job(job.pk)),
                task=formatting.task(job),
                priority=formatting.priority(job, now),
                waits=formatting.moment(job.available_at, formatting.passed(job.available_at, now)),
            )
            for job in found
        ],
        "ready_url": links.jobs(State.READY, queue.pk),
    }


def _workers(request: HttpRequest, queue: Queue, now: datetime, links: Links) -> dict[str, Any]:
    """Return the workers that serve the queue, for those who may view workers."""
    if not sight.may_view(request, links.site, Worker):
        return {"may_see_workers": False}
    live = sight.rows(request, links.site, Worker).filter(stopped_at__isnull=True)
    live = live.order_by("name", "id")[:WORKERS_LOOKED_AT]
    serving = [row for row in live if status.serves(row, queue.pk)]
    shown = [
        (
            linked(row, links.worker(row.pk)),
            panels.worker_badge(row, (now - row.heartbeat_at).total_seconds()),
        )
        for row in serving[:MOST_WORKERS]
    ]
    more = len(serving) - len(shown)
    return {"may_see_workers": True, "workers": shown, "more_workers": more}
