"""The page of worker processes, those that have stopped included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.contrib import admin
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from relay_queue.admin import cells, sight, workerpage
from relay_queue.admin.acts.workers import WorkerActs
from relay_queue.admin.dashboard.links import Links
from relay_queue.admin.dashboard.panels import worker_badge
from relay_queue.admin.lists.filters import PresenceFilter
from relay_queue.admin.reading import DetailAdmin
from relay_queue.models import Worker


class StoppedFilter(PresenceFilter):
    """Filters by whether the worker has been seen to end."""

    title = _("stopped")
    parameter_name = "stopped"
    field = "stopped_at"
    present = _("Stopped")
    absent = _("Running")


COUNTED: Final = frozenset({"ran_well", "ran_badly", "came_late"})
"""Columns with numbers of attempts, of whatever jobs."""


@admin.register(Worker)
class WorkerAdmin(WorkerActs, DetailAdmin):
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
    search_help_text = _("A part of the name or of the host")
    ordering = ("-id",)
    change_form_template = "admin/relay_queue/worker.html"

    def detail(self, request: HttpRequest, shown: Worker) -> Mapping[str, object]:
        """Show the worker."""
        links = Links(request, self.admin_site)
        title = gettext("Worker %(name)s") % {"name": shown.name}
        return {"title": title, **workerpage.context(request, shown, links)}

    def get_list_display(self, request: HttpRequest) -> Any:
        """Leave out the numbers of attempts where they count jobs that this person may not see."""
        shown = super().get_list_display(request)
        if sight.counters_tell(request, self.admin_site, Worker):
            return shown
        return [column for column in shown if column not in COUNTED]

    @admin.display(description=_("process"))
    def place(self, worker: Worker) -> str:
        """Show the machine and the process."""
        return gettext("%(host)s, pid %(pid)s") % {"host": worker.host, "pid": worker.pid}

    @admin.display(description=_("state"))
    def state(self, worker: Worker) -> SafeString:
        """Show what the worker does, as far as is known."""
        return worker_badge(worker, (cells.now() - worker.heartbeat_at).total_seconds())

    @admin.display(description=_("slots"))
    def slots(self, worker: Worker) -> SafeString:
        """Show how many jobs it runs at once."""
        return cells.count(_("slots"), worker.concurrency)

    @admin.display(description=_("heartbeat"))
    def heartbeat(self, worker: Worker) -> SafeString:
        """Show when it was last heard of."""
        return cells.labelled(_("heartbeat"), cells.ago(worker.heartbeat_at, cells.now()))

    @admin.display(description=_("started"))
    def began(self, worker: Worker) -> SafeString:
        """Show when it started."""
        return cells.labelled(_("started"), cells.ago(worker.started_at, cells.now()))

    @admin.display(description=_("succeeded"))
    def ran_well(self, worker: Worker) -> SafeString:
        """Show how many attempts succeeded."""
        return cells.count(_("succeeded"), worker.succeeded)

    @admin.display(description=_("failed"))
    def ran_badly(self, worker: Worker) -> SafeString:
        """Show how many attempts failed."""
        return cells.count(_("failed"), worker.failed)

    @admin.display(description=_("refused"))
    def came_late(self, worker: Worker) -> SafeString:
        """Show how many of its outcomes were refused."""
        return cells.count(_("refused"), worker.refused)
