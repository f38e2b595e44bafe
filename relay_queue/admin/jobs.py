"""Jobs: the lists of all, of dead letters and of waiting retries, and the page of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from relay_queue import conf
from relay_queue.admin import formatting, jobpage, sight, texts
from relay_queue.admin.actions.jobs import JobActions
from relay_queue.admin.formatting import column
from relay_queue.admin.lists.filters import (
    CreatedFilter,
    DueFilter,
    FinishedFilter,
    QueueFilter,
    StateFilter,
    TaskFilter,
    VerdictFilter,
)
from relay_queue.admin.reading import ScanningAdmin
from relay_queue.models import DeadLetter, Job, Lease, Queue, Retry
from relay_queue.query import ledger, list_plans
from relay_queue.query.list_plans import Criteria
from relay_queue.query.lists import IndexScan, Names
from relay_queue.states import State

OF_LEASES: Final = frozenset({"last_attempt", "verdict"})
"""Columns that come from the leases."""


class JobList(ScanningAdmin):
    """A list of jobs. Subclasses choose the columns, the filters and the order."""

    list_display_links: Any = ("job",)
    counted = True
    linked = frozenset(
        {"created_at__gte", "created_at__lte", "finished_at__gte", "finished_at__lte"}
    )
    search_fields = ("id", "task", "queue", "idempotency_key", "last_error")

    def plan(self, asked: Criteria, names: Names) -> IndexScan:
        """Choose the index for the criteria."""
        return list_plans.jobs(asked, names)

    def get_list_display(self, request: HttpRequest) -> Any:
        """Leave out the columns of the leases for those who may not view leases."""
        shown = super().get_list_display(request)
        if sight.may_view(request, self.admin_site, Lease):
            return shown
        return [column for column in shown if column not in OF_LEASES]

    def get_list_filter(self, request: HttpRequest) -> Any:
        """Leave out the filter by verdict for the same people: it tells as much as the column."""
        filters = super().get_list_filter(request)
        if sight.may_view(request, self.admin_site, Lease):
            return filters
        return [each for each in filters if each is not VerdictFilter]

    def rows(self, request: HttpRequest, ids: Sequence[int]) -> Mapping[int, Any]:
        """Read the jobs of a page, with newest lease and verdict for those who may view leases."""
        jobs = self.get_queryset(request).filter(pk__in=ids)
        may_see_leases = sight.may_view(request, self.admin_site, Lease)
        if may_see_leases:
            newest = sight.leases(request, self.admin_site).filter(job=OuterRef("pk"))
            newest_id = Subquery(newest.order_by("-id").values("pk")[:1])
            jobs = ledger.annotate_verdict(jobs).annotate(newest_lease_id=newest_id)
        rows: dict[int, Any] = {job.pk: job for job in jobs.defer("payload", "result")}
        leases = self._leases(request, rows.values()) if may_see_leases else {}
        aging = Queue.objects.using(conf.get().database).values_list("name", "aging_seconds")
        aging_of = dict(aging)
        may_see_errors = sight.may_view_payload(request, self.admin_site)
        for job in rows.values():
            job.newest_lease = leases.get(getattr(job, "newest_lease_id", None) or 0)
            job.aging_seconds = aging_of.get(job.queue)
            job.shown_error = texts.last_error(job, job.newest_lease, may_see=may_see_errors)
        return rows

    def _leases(self, request: HttpRequest, jobs: Iterable[Any]) -> dict[int, Any]:
        """Return the newest leases of jobs, with their workers for those who may view workers."""
        found = Lease.objects.using(conf.get().database).defer("traceback")
        leases: dict[int, Any] = found.in_bulk(
            [j.newest_lease_id for j in jobs if j.newest_lease_id]
        )
        sight.name_workers(request, self.admin_site, leases.values())
        return leases

    job = column(_("job"), lambda job: job.pk)
    state_badge = column(_("state"), lambda job: formatting.state_badge(job.state))
    task_name = column(_("task"), formatting.task)
    task_and_error = column(_("task"), lambda job: formatting.task(job, job.shown_error))
    priority_now = column(_("priority"), lambda job: formatting.priority(job, job.now))
    attempts = column(_("attempts"), formatting.attempts)
    age = column(_("age"), lambda job: formatting.when(job, job.now))
    last_attempt = column(
        _("last attempt"), lambda job: formatting.attempt(job.newest_lease, job.now)
    )
    verdict = column(_("verdict"), lambda job: formatting.verdict_badge(job.verdict))
    error = column(_("last error"), lambda job: formatting.error(job.shown_error))


class ProxyList(JobList):
    """A list of jobs in one state. Each row links to the one page of its job, under all jobs."""

    state: State

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow those who may view the page of jobs at this site."""
        return sight.may_view(request, self.admin_site, Job)

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Show the list in the sidebar to those who may view it."""
        return self.has_view_permission(request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Read the jobs in the state of this list, among those that the page of jobs shows."""
        rows = super().get_queryset(request).filter(state=self.state)
        return sight.of_jobs(request, self.admin_site, rows, "pk")

    def whole(self) -> QuerySet[Any]:
        """Return the jobs in the state of this list."""
        return super().whole().filter(state=self.state)

    def criteria(self) -> Criteria:
        """Ask for the state of this list."""
        return Criteria(state=self.state)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Redirect to the page of the job, whatever its present state is."""
        name = f"{self.admin_site.name}:relay_queue_job_change"
        return redirect(reverse(name, args=[quote(object_id)]))

    @admin.display(description=_("job"))
    def job_link(self, job: Job) -> SafeString:
        """Show the id, as a link to the page of the job."""
        return self.link_to(Job, job.pk, job.pk)


@admin.register(Job)
class JobAdmin(JobActions, JobList):
    """All jobs, the newest first, and the page of each."""

    list_display = (
        "job",
        "state_badge",
        "task_and_error",
        "queue",
        "priority_now",
        "attempts",
        "age",
        "last_attempt",
        "verdict",
    )
    list_filter = (
        StateFilter,
        QueueFilter,
        TaskFilter,
        VerdictFilter,
        ("created_at", CreatedFilter),
        ("available_at", DueFilter),
        ("finished_at", FinishedFilter),
    )
    change_form_template = "admin/relay_queue/job.html"
    # The page has a template of its own: a form would show the payload to everybody.
    fields = ()

    class Media:
        """The look of the page of one job."""

        css: ClassVar[dict[str, list[str]]] = {"all": ["relay_queue/job.css"]}

    def has_view_payload_permission(self, request: HttpRequest) -> bool:
        """Say whether this person may view arguments, results, errors and keys.

        The answer holds for every page of this admin site. A project may override it.
        """
        return sight.has_view_payload(request)

    def detail(self, request: HttpRequest, shown: Job) -> Mapping[str, object]:
        """Return the title and the content of the page of one job."""
        title = gettext("Job %(id)s") % {"id": shown.pk}
        return {"title": title, **jobpage.context(request, shown, self.admin_site)}


@admin.register(DeadLetter)
class DeadLetterAdmin(JobActions, ProxyList):
    """Dead letters, the latest first, with the error that ended them."""

    state = State.DEAD
    list_display = (
        "job_link",
        "task_name",
        "queue",
        "error",
        "attempts",
        "verdict",
        "died",
        "last_attempt",
    )
    list_display_links = None
    list_filter = (
        QueueFilter,
        TaskFilter,
        ("finished_at", FinishedFilter),
        VerdictFilter,
        ("created_at", CreatedFilter),
    )

    died = column(_("died"), lambda job: formatting.ago(job.finished_at, job.now))


@admin.register(Retry)
class RetryAdmin(JobActions, ProxyList):
    """Jobs that wait for their next attempt, the next due first."""

    state = State.RETRYING
    list_display = (
        "job_link",
        "task_name",
        "queue",
        "due",
        "attempts",
        "error",
        "priority_now",
        "verdict",
        "last_attempt",
    )
    list_display_links = None
    list_filter = (
        QueueFilter,
        TaskFilter,
        ("available_at", DueFilter),
        VerdictFilter,
        ("created_at", CreatedFilter),
    )

    due = column(_("due"), lambda job: formatting.due(job.available_at, job.now))
