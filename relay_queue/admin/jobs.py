"""The page of jobs, each with the ledger of its attempts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from rangefilter.filters import DateTimeRangeFilterBuilder

from relay_queue import conf
from relay_queue.admin.acts.jobs import JobActs
from relay_queue.admin.reading import QueueFilter, ReadingAdmin, as_id
from relay_queue.models import Job, Lease

if TYPE_CHECKING:
    TabularInline = admin.TabularInline[Lease, Job]
else:
    TabularInline = admin.TabularInline

MOST_SHOWN_CHARS: Final = 20_000
MOST_SHOWN_ATTEMPTS: Final = 100
HIDDEN: Final = "(hidden)"


class Attempts(TabularInline):
    """The ledger of one job, the newest attempt first."""

    model = Lease
    verbose_name_plural = _("attempts")
    fields = ("attempt", "outcome", "worker", "acquired_at", "ended_at", "error", "refused")
    readonly_fields = ("refused",)
    ordering = ("-id",)
    show_change_link = True
    extra = 0
    can_delete = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Lease]:
        """Read the newest from the database of the queue: a job may snooze for years."""
        rows = super().get_queryset(request).using(conf.get().database)
        match = request.resolver_match
        job_id = as_id(str(match.kwargs.get("object_id"))) if match else None
        newest = rows.filter(job=job_id).order_by("-id").values("pk")[:MOST_SHOWN_ATTEMPTS]
        return rows.filter(pk__in=newest).select_related("worker")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody may add an attempt."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody may change an attempt."""
        return False

    @admin.display(description=_("late return, refused"))
    def refused(self, lease: Lease) -> str:
        """Say with which verb the owner came back late, and why it was refused."""
        return f"{lease.refused_verb}: {lease.refused_reason}" if lease.refused_at else ""


@admin.register(Job)
class JobAdmin(JobActs, ReadingAdmin):
    """Jobs, the newest first."""

    list_display = (
        "id",
        "task",
        "queue",
        "state",
        "attempts",
        "last_error",
        "priority",
        "created_at",
        "finished_at",
    )
    list_filter = (
        "state",
        QueueFilter,
        ("created_at", DateTimeRangeFilterBuilder()),
        ("finished_at", DateTimeRangeFilterBuilder()),
    )
    search_fields = ("id", "task", "queue", "idempotency_key")
    search_help_text = _("The id of a job, a part of the task's path, a queue, or a key")
    ordering = ("-id",)
    inlines = (Attempts,)
    readonly_fields = ("attempts", "arguments", "returned")
    fieldsets = (
        (None, {"fields": ("task", "queue", "state", "attempts", "last_error")}),
        (_("Data"), {"fields": ("arguments", "returned", "idempotency_key")}),
        (_("Times"), {"fields": ("created_at", "available_at", "started_at", "finished_at")}),
        (
            _("Options"),
            {
                "classes": ("collapse",),
                "fields": (
                    "priority",
                    "max_attempts",
                    "timeout_seconds",
                    "lease_seconds",
                    "backoff_base_seconds",
                    "backoff_max_seconds",
                    "backoff_jitter",
                    "backend",
                ),
            },
        ),
    )

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        """Find a job by its id, else jobs by a part of the task, by queue or by key."""
        term = search_term.strip()
        if not term:
            return queryset, False
        job_id = as_id(term)
        if job_id is not None:
            return queryset.filter(pk=job_id), False
        found = Q(task__icontains=term) | Q(queue=term) | Q(idempotency_key=term)
        return queryset.filter(found), False

    @admin.display(description=_("attempts"))
    def attempts(self, job: Job) -> str:
        """Show how much of the budget is used."""
        return f"{job.attempt - job.attempt_base} / {job.max_attempts}"

    @admin.display(description=_("arguments"))
    def arguments(self, job: Job) -> SafeString:
        """Show the arguments, without the values that ``RELAY["REDACT"]`` names."""
        return _as_block(job.payload)

    @admin.display(description=_("result"))
    def returned(self, job: Job) -> SafeString:
        """Show what the function returned."""
        return _as_block(job.result or "")


def _as_block(text: str) -> SafeString:
    try:
        value = _redacted(json.loads(text), frozenset(conf.get().redact))
        shown = json.dumps(value, indent=2, ensure_ascii=False)
    except ValueError:  # altered on disk; shown as it is
        shown = text
    if len(shown) > MOST_SHOWN_CHARS:
        shown = f"{shown[:MOST_SHOWN_CHARS]}\n… {len(shown) - MOST_SHOWN_CHARS:,} more characters"
    return format_html('<pre style="margin: 0; white-space: pre-wrap">{}</pre>', shown)


def _redacted(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if key in names else _redacted(item, names) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_redacted(item, names) for item in value]
    return value
