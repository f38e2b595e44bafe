"""Leases: which worker holds which job now, and the record of every attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from relay_queue.admin import formatting, sight, texts
from relay_queue.admin.formatting import column
from relay_queue.admin.lists.filters import (
    JobQueueFilter,
    OutcomeFilter,
    PresenceFilter,
    SpanFilter,
)
from relay_queue.admin.lists.searching import Term
from relay_queue.admin.reading import ScanningAdmin
from relay_queue.models import Job, Lease, Worker
from relay_queue.query import list_plans
from relay_queue.query.list_plans import Criteria
from relay_queue.query.lists import IndexScan, Names


class GrantedFilter(SpanFilter):
    """Filters leases by when they were granted."""

    heading = _("Granted")


class OpenFilter(PresenceFilter):
    """Filters by whether the lease is still open."""

    title = _("lease")
    parameter_name = "ended"
    field = "ended_at"
    present = _("Ended")
    absent = _("Open")


class RefusedFilter(PresenceFilter):
    """Filters by whether the owner returned too late."""

    title = _("late return")
    parameter_name = "refused"
    field = "refused_at"


@admin.register(Lease)
class LeaseAdmin(ScanningAdmin):
    """Leases, the newest first."""

    list_display = (
        "lease",
        "outcome_badge",
        "job_link",
        "attempt",
        "worker_name",
        "granted",
        "lasted",
        "error_name",
        "late_return",
    )
    list_filter = (
        OpenFilter,
        OutcomeFilter,
        RefusedFilter,
        JobQueueFilter,
        ("acquired_at", GrantedFilter),
    )
    linked = frozenset({"refused_at__gte", "ended_at__gte", "outcome__in", "worker__id__exact"})
    search_fields = ("job__id",)
    search_kinds = ("id",)
    search_help_text = _("The id of a job finds its attempts.")
    fields = (
        "job",
        "attempt",
        "worker_shown",
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
    readonly_fields = ("token_start", "traceback_text", "worker_shown")

    class Media:
        """The look of the page of one lease."""

        css: ClassVar[dict[str, list[str]]] = {"all": ["relay_queue/job.css"]}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Read the leases of those jobs that the page of jobs at this site shows."""
        return sight.of_jobs(request, self.admin_site, super().get_queryset(request))

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any | None:
        """Return a lease with the parts of its worker and traceback that this person may see."""
        lease = super().get_object(request, object_id, from_field)
        if lease is not None:
            sight.name_workers(request, self.admin_site, [lease])
            may_see = sight.may_view_payload(request, self.admin_site)
            lease.shown_traceback = texts.traceback(lease, may_see=may_see)
        return lease

    def search_condition(self, term: Term) -> Q:
        """Find the leases of a job by its id."""
        return Q(job=int(term.word))

    def plan(self, asked: Criteria, names: Names) -> IndexScan:
        """Choose the index for the criteria."""
        return list_plans.leases(asked, names)

    def rows(self, request: HttpRequest, ids: Sequence[int]) -> Mapping[int, Any]:
        """Read the leases of one page with their jobs and workers."""
        leases = self.get_queryset(request).filter(pk__in=ids).select_related("job")
        rows = {row.pk: row for row in leases.defer("traceback", "job__payload", "job__result")}
        sight.name_workers(request, self.admin_site, rows.values())
        return rows

    lease = column(_("lease"), lambda lease: lease.pk)
    outcome_badge = column(_("outcome"), lambda lease: formatting.outcome_badge(lease.outcome))
    worker_name = column(_("worker"), formatting.worker)
    granted = column(_("granted"), lambda lease: formatting.ago(lease.acquired_at, lease.now))
    lasted = column(_("lasted"), lambda lease: formatting.ran(lease, lease.now))
    error_name = column(_("error"), lambda lease: formatting.error(lease.error))
    late_return = column(_("late return"), formatting.late_return)
    token_start = column(_("token"), lambda lease: formatting.token(lease.token))
    # In its own lines, as far as this person may see it.
    traceback_text = column(
        _("traceback"),
        lambda lease: format_html('<pre class="relay-code">{}</pre>', lease.shown_traceback),
    )

    @admin.display(description=_("job"))
    def job_link(self, lease: Lease) -> SafeString:
        """Show the id and task of the job, as a link to its page."""
        link = self.link_to(Job, lease.job_id, lease.job_id)
        return format_html("{} {}", link, formatting.task(lease.job))

    @admin.display(description=_("worker"))
    def worker_shown(self, lease: Any) -> str:
        """Show the worker, as a link to its page."""
        worker = lease.shown_worker
        if worker is None:
            return formatting.worker(lease)
        return self.link_to(Worker, worker.pk, worker)
