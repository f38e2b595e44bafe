"""The pages of jobs in the admin: the three lists, and the page of one job."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from relay_queue.admin import sight
from relay_queue.admin.acts.jobs import JobActs
from relay_queue.admin.joblists import DeadLetters, Jobs, Retries
from relay_queue.admin.jobpage import view
from relay_queue.models import DeadLetter, Job, Retry


@admin.register(Job)
class JobAdmin(JobActs, Jobs):
    """All jobs, and the page of each."""

    change_form_template = "admin/relay_queue/job.html"
    # The page shows all of a job itself; a form with its columns would show the payload to anybody.
    fields = ()

    class Media:
        """The look of the page of one job."""

        css: ClassVar[dict[str, list[str]]] = {"all": ["relay_queue/job.css"]}

    def has_view_payload_permission(self, request: HttpRequest) -> bool:
        """Ask for the permission to view arguments, results, errors and keys.

        It holds for every page of this admin site. A project may override it.
        """
        return sight.has_view_payload(request)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """Show the job."""
        job = options.get("obj")
        if isinstance(job, Job):
            context |= view.context(request, job, self.admin_site)
            context |= {"title": _("Job %(id)s") % {"id": job.pk}, "subtitle": None}
        return super().render_change_form(request, context, *args, **options)


@admin.register(DeadLetter)
class DeadLetterAdmin(JobActs, DeadLetters):
    """The dead letters."""


@admin.register(Retry)
class RetryAdmin(JobActs, Retries):
    """The jobs between two attempts."""
