"""The page of queues, with the jobs in them from the counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.contrib import admin
from django.db.models import OuterRef, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from relay_queue.admin import cells, queuepage, sight, words
from relay_queue.admin.acts.queues import QueueActs
from relay_queue.admin.dashboard.links import Links
from relay_queue.admin.reading import DetailAdmin
from relay_queue.models import Queue, QueueCount
from relay_queue.states import UNFINISHED, State

COUNTED: Final = frozenset({"unfinished", "ready", "running", "dead"})
"""Columns with numbers of jobs, from the counters."""


@admin.register(Queue)
class QueueAdmin(QueueActs, DetailAdmin):
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
        """Show the queue."""
        links = Links(request, self.admin_site)
        title = gettext("Queue %(name)s") % {"name": shown.pk}
        return {"title": title, **queuepage.context(request, shown, links)}

    def get_list_display(self, request: HttpRequest) -> Any:
        """Leave out the numbers of jobs where they count some that this person may not see."""
        shown = super().get_list_display(request)
        if sight.counters_tell(request, self.admin_site, Queue):
            return shown
        return [column for column in shown if column not in COUNTED]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Add the numbers of jobs; the counters are short and exact."""
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

    @admin.display(description=_("unfinished"))
    def unfinished(self, queue: Any) -> SafeString:
        """Show how many jobs count against the capacity."""
        return cells.count(_("unfinished"), queue.n_unfinished)

    @admin.display(description=_("ready"))
    def ready(self, queue: Any) -> SafeString:
        """Show how many jobs wait for a worker."""
        return cells.count(_("ready"), queue.n_ready)

    @admin.display(description=_("running"))
    def running(self, queue: Any) -> SafeString:
        """Show how many jobs run."""
        return cells.count(_("running"), queue.n_running)

    @admin.display(description=_("dead letters"))
    def dead(self, queue: Any) -> SafeString:
        """Show how many jobs wait for an operator."""
        return cells.count(_("dead letters"), queue.n_dead)

    @admin.display(description=_("claims"))
    def claims(self, queue: Queue) -> SafeString:
        """Show whether workers claim from it."""
        return queuepage.claims(queue)

    @admin.display(description=_("capacity"))
    def jobs_admitted(self, queue: Queue) -> SafeString:
        """Show how many unfinished jobs it admits."""
        return cells.count(_("capacity"), queue.capacity)

    @admin.display(description=_("max running"))
    def leases_admitted(self, queue: Queue) -> SafeString:
        """Show how many of its jobs may run at once."""
        return cells.count(_("max running"), queue.max_running)

    @admin.display(description=_("aging"))
    def aging(self, queue: Queue) -> SafeString:
        """Show how long a job waits for one class of priority."""
        return cells.labelled(_("aging"), words.duration(queue.aging_seconds))


def _jobs(*states: State) -> Coalesce:
    counted = QueueCount.objects.filter(queue=OuterRef("name"), state__in=states)
    total = counted.order_by().values("queue").annotate(total=Sum("n")).values("total")
    return Coalesce(Subquery(total), 0)
