"""The pages of the dashboard: the whole page, and the part of it that is refreshed in place."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.translation import gettext as _

from relay_queue.admin import sight
from relay_queue.admin.dashboard import charts, panels, tiles
from relay_queue.admin.dashboard.attention import notices
from relay_queue.admin.dashboard.links import Links
from relay_queue.admin.reading import ReadingAdmin
from relay_queue.logs import get_logger
from relay_queue.models import Dashboard, Job, Queue, Worker
from relay_queue.quantities import number
from relay_queue.query import status
from relay_queue.query.history import Histogram
from relay_queue.query.status import Overview

logger = get_logger("relay_queue.admin")

PERMISSION: Final = "relay_queue.view_dashboard"
REFRESH_SECONDS: Final = 5
MINUTE: Final = timedelta(minutes=1)


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
        "tiles_now": tiles.now(found, links),
        "tiles_lately": tiles.lately(found, links),
        "states": panels.LISTED,
        **panels.queues(found, links),
        "totals": panels.totals(found, links),
        "charts": [
            charts.throughput("hour", _("Last hour, by minute"), found.hour.spans, MINUTE),
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
    live = [worker for worker in found.workers if worker.row.stopped_at is None]
    stopped = [worker for worker in found.workers if worker.row.stopped_at is not None]
    more = len(live) - panels.MOST_WORKERS
    return {
        "workers": panels.worker_rows(status.most_urgent(live, panels.MOST_WORKERS), links),
        "more_workers": number(more) if more > 0 else "",
        "all_workers": links.workers(),
        "stopped_workers": panels.worker_rows(stopped, links),
    }
