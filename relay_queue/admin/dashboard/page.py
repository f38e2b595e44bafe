"""The pages of the dashboard: the whole page, and the part of it that is refreshed in place.

On top stand notices: what an operator should know first, in whole sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from relay_queue.admin import sight
from relay_queue.admin.dashboard import charts, panels
from relay_queue.admin.dashboard.links import Links
from relay_queue.admin.dashboard.panels import is_silent
from relay_queue.admin.reading import ReadingAdmin
from relay_queue.logs import get_logger
from relay_queue.models import Dashboard, Job, Queue, Worker
from relay_queue.quantities import duration, number
from relay_queue.query import status
from relay_queue.query.history import Histogram
from relay_queue.query.status import Overview, QueueStatus, WorkerStatus, serves
from relay_queue.states import State

logger = get_logger("relay_queue.admin")

PERMISSION: Final = "relay_queue.view_dashboard"
REFRESH_SECONDS: Final = 5

MOST_NOTICES: Final = 20
"""Notices that are shown; a thousand paused queues are one finding."""


@admin.register(Dashboard)
class DashboardAdmin(ReadingAdmin):
    """A page of its own in place of a list, for those who may view the dashboard."""

    class Media:
        """The style sheet and the refreshing script of this page."""

        css = {"all": ["relay_queue/dashboard.css"]}
        js = ["relay_queue/live.js"]

    def get_urls(self) -> list[URLPattern]:
        """Return the two pages. The first has the name under which the admin looks for a list."""
        view = self.admin_site.admin_view
        return [
            path("", view(self.page), name="relay_queue_dashboard_changelist"),
            path("live/", view(self.live), name="relay_queue_dashboard_live"),
        ]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Ask for the dashboard's own permission: the page shows no job, so it needs no other.

        Its figures count all queues, jobs and workers. A site that limits one of these has no
        dashboard.
        """
        if not request.user.has_perm(PERMISSION):
            return False
        return not any(
            sight.limits(request, self.admin_site, model) for model in (Job, Queue, Worker)
        )

    def page(self, request: HttpRequest) -> TemplateResponse:
        """Show the whole page with its figures, so that it is complete without the script."""
        context = {
            **self.admin_site.each_context(request),
            "title": _("Dashboard"),
            "media": self.media,
            "opts": self.opts,
            "refresh_seconds": REFRESH_SECONDS,
            "refresh_milliseconds": REFRESH_SECONDS * 1_000,
        }
        # Never a shared one: whoever has just changed something looks for it here.
        return self._response(request, "dashboard.html", context, status.read_overview)

    def live(self, request: HttpRequest) -> TemplateResponse:
        """Show the part that the script refreshes."""
        return self._response(request, "dashboard/live.html", {}, status.shared_overview)

    def _response(
        self,
        request: HttpRequest,
        template: str,
        context: dict[str, Any],
        read: Callable[[], Overview],
    ) -> TemplateResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        code = 200
        try:
            context |= shown(read(), Links(request, self.admin_site))
        except DatabaseError as error:
            logger.warning("The dashboard could not be read: %s", error)
            code, context["trouble"] = 503, str(error)
        return TemplateResponse(request, f"admin/relay_queue/{template}", context, status=code)


def shown(found: Overview, links: Links) -> dict[str, Any]:
    """Return what the templates show of an overview."""
    return {
        "now": timezone.localtime(found.now),
        "notices": notices(found, links),
        "tiles_now": panels.tiles_now(found, links),
        "tiles_lately": panels.tiles_lately(found, links),
        "states": panels.LISTED,
        **panels.queues(found, links),
        "totals": panels.totals(found, links),
        "charts": [
            charts.last_hour(found.hour.spans),
            charts.throughput("day", _("Last 24 hours, by half hour"), found.day, status.SPAN),
        ],
        "timings": [
            _timing("wait", _("Wait, last hour"), found.hour.wait),
            _timing("run", _("Run, last hour"), found.hour.run),
        ],
        **_workers(found, links),
    }


def _timing(key: str, title: str, histogram: Histogram) -> dict[str, Any]:
    return {
        "chart": charts.durations(key, title, histogram),
        "percentiles": panels.percentiles(histogram),
    }


def _workers(found: Overview, links: Links) -> dict[str, Any]:
    live = panels.live_workers(found)
    shown = status.most_urgent(live, panels.MOST_WORKERS)
    more = len(live) - panels.MOST_WORKERS
    return {
        "workers": [panels.worker_row(worker, links) for worker in shown],
        "more_workers": number(more) if more > 0 else "",
        "all_workers": links.workers(),
        "stopped_workers": [
            panels.worker_row(worker, links)
            for worker in found.workers
            if worker.row.stopped_at is not None
        ],
    }


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence, and the address of the page to act on. ``level`` is error or warning."""

    key: str
    level: str
    text: str
    address: str


def notices(overview: Overview, links: Links) -> list[Notice]:
    """Return the notices, errors before warnings."""
    live = panels.live_workers(overview)
    heard = [worker for worker in live if not is_silent(worker)]
    found = [
        *_nobody_works(overview, heard, links),
        *(notice for queue in overview.queues for notice in _of_queue(queue, heard, links)),
        *(_hindrance(worker, links) for worker in live if worker.row.stop_reason),
        *(_silence(worker, links) for worker in live if is_silent(worker)),
    ]
    found.sort(key=lambda notice: notice.level != "error")
    more = len(found) - MOST_NOTICES
    if more > 0:
        text = ngettext("%(n)s notice more.", "%(n)s notices more.", more) % {"n": number(more)}
        found[MOST_NOTICES:] = [Notice("more", "warning", text, links.queues())]
    return found


def _nobody_works(overview: Overview, heard: list[WorkerStatus], links: Links) -> Iterator[Notice]:
    ready = overview.jobs(State.READY)
    if heard or not overview.queues:
        return
    text = _("No worker is alive. Start one with manage.py runworker.")
    if ready:
        text = ngettext(
            "No worker is alive, and %(n)s job is ready. Start one with manage.py runworker.",
            "No worker is alive, and %(n)s jobs are ready. Start one with manage.py runworker.",
            ready,
        ) % {"n": number(ready)}
    yield Notice("workers", "error" if ready else "warning", text, links.workers())


def _of_queue(queue: QueueStatus, heard: list[WorkerStatus], links: Links) -> Iterator[Notice]:
    address, name = links.queue(queue.name), {"queue": queue.name}
    if queue.capacity is not None and queue.unfinished >= queue.capacity:
        text = _("Queue %(queue)s is full: enqueueing is refused until jobs finish.") % name
        yield Notice(f"full-{queue.name}", "error", text, address)
    if queue.paused_at is not None:
        text = _("Queue %(queue)s is paused: nothing is claimed from it.") % name
        yield Notice(f"paused-{queue.name}", "warning", text, address)
    elif heard and queue.counts.get(State.READY) and not _is_served(queue.name, heard):
        text = _("Jobs are ready in queue %(queue)s, and no worker serves it.") % name
        yield Notice(f"unserved-{queue.name}", "error", text, address)


def _is_served(queue: str, heard: list[WorkerStatus]) -> bool:
    return any(serves(worker.row, queue) for worker in heard)


def _hindrance(worker: WorkerStatus, links: Links) -> Notice:
    text = _("Worker %(worker)s %(reason)s. No job is given up for that; see relay doctor.") % {
        "worker": worker.row,
        "reason": worker.row.stop_reason,
    }
    return Notice(f"hindered-{worker.row.pk}", "error", text, links.worker(worker.row.pk))


def _silence(worker: WorkerStatus, links: Links) -> Notice:
    text = _("Worker %(worker)s has been silent for %(time)s.") % {
        "worker": worker.row,
        "time": duration(worker.heartbeat_age_seconds),
    }
    return Notice(f"silent-{worker.row.pk}", "warning", text, links.worker(worker.row.pk))
