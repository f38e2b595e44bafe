"""The page of leases: who holds which job now, and the record of every attempt."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from rangefilter.filters import DateTimeRangeFilterBuilder

from relay_queue.admin.reading import PresenceFilter, QueueFilter, ReadingAdmin, as_id
from relay_queue.models import Lease

TOKEN_CHARS: Final = 6
"""Shown of a token. Whoever knows the whole of it can settle the job."""


class JobQueueFilter(QueueFilter):
    """Filters leases by the queue of their job."""

    field = "job__queue"


class OpenFilter(PresenceFilter):
    """Filters by whether the lease is still open."""

    title = _("state")
    parameter_name = "ended"
    field = "ended_at"
    present = _("Ended")
    absent = _("Open")


class RefusedFilter(PresenceFilter):
    """Filters by whether the owner came back too late."""

    title = _("late return")
    parameter_name = "refused"
    field = "refused_at"


@admin.register(Lease)
class LeaseAdmin(ReadingAdmin):
    """Leases, the newest first."""

    list_display = (
        "id",
        "job",
        "attempt",
        "worker",
        "acquired_at",
        "ended_at",
        "outcome",
        "error",
        "refused_reason",
    )
    list_select_related = ("job", "worker")
    list_filter = (
        OpenFilter,
        "outcome",
        RefusedFilter,
        JobQueueFilter,
        ("acquired_at", DateTimeRangeFilterBuilder()),
    )
    search_fields = ("job__id", "job__task")
    search_help_text = _("The id of a job, or a part of the task's path")
    ordering = ("-id",)
    fields = (
        "job",
        "attempt",
        "worker",
        "token_start",
        "acquired_at",
        "renewed_at",
        "expires_at",
        "ended_at",
        "outcome",
        "error",
        "traceback_text",
        "refused_at",
        "refused_verb",
        "refused_reason",
    )
    readonly_fields = ("token_start", "traceback_text")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find the leases of a job by its id, else those of a task."""
        term = search_term.strip()
        if not term:
            return queryset, False
        job_id = as_id(term)
        found = Q(job__task__icontains=term) if job_id is None else Q(job=job_id)
        return queryset.filter(found), False

    @admin.display(description=_("token"))
    def token_start(self, lease: Lease) -> str:
        """Show enough of the token to recognise it."""
        return f"{lease.token[:TOKEN_CHARS]}…"

    @admin.display(description=_("traceback"))
    def traceback_text(self, lease: Lease) -> SafeString:
        """Show the traceback with its lines."""
        return format_html('<pre style="margin: 0">{}</pre>', lease.traceback)
