"""The pages of bulk acts: the list of all, and the progress of one."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import SEARCH_VAR
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet, Value
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue import conf, store
from relay_queue.admin import formatting, sight
from relay_queue.admin.actions.catalogue import Action, job_action
from relay_queue.admin.actions.matching import MOST_COUNTED, record_progress
from relay_queue.admin.actions.pages import pressed_nothing
from relay_queue.admin.actions.perform import attempt
from relay_queue.admin.dashboard.links import Links
from relay_queue.admin.formatting import age_column, column, named_column, number_column
from relay_queue.admin.lists import searching
from relay_queue.admin.reading import ReadingAdmin
from relay_queue.models import BulkAct, Job
from relay_queue.quantities import number
from relay_queue.states import TERMINAL, State


def filter_text(bulk: Any) -> str:
    """Return the filters of a bulk act in words, as the address of the list has them.

    A search in keys and errors is hidden from those who may not view such texts.
    """
    pairs = parse_qsl(bulk.filters)
    if _is_secret(bulk):
        pairs = [(name, str(_("(hidden)")) if name == SEARCH_VAR else text) for name, text in pairs]
    said = (f"{name.removesuffix('__exact').replace('__', ' ')}: {text}" for name, text in pairs)
    return ", ".join(said) or str(_("every job"))


def _is_secret(bulk: Any) -> bool:
    """Say whether the filter has a text that this viewer may not see."""
    term = searching.parse(dict(parse_qsl(bulk.filters)).get(SEARCH_VAR, ""))
    return term is not None and term.kind in searching.SECRET and not bulk.sees_payload


def _found(bulk: BulkAct) -> str:
    """Return how many jobs matched at the start; more than ``MOST_COUNTED`` are not counted."""
    return f"> {number(MOST_COUNTED)}" if bulk.matched is None else number(bulk.matched)


def _label(bulk: BulkAct) -> str:
    action = job_action(bulk.act)
    return bulk.act if action is None else str(action.label)


def _badge(bulk: BulkAct) -> SafeString:
    if bulk.cancelled_at is not None:
        return formatting.badge(State.CANCELLED, _("Ended by hand"), formatting.SLASHED)
    if bulk.stop_reason:
        why = formatting.error(bulk.stop_reason)
        stopped = formatting.badge(State.DEAD, _("Stopped"), formatting.CROSS)
        return format_html("{}<br>{}", stopped, why)
    if bulk.finished_at is not None:
        return formatting.badge(State.SUCCEEDED, _("Done"), formatting.CHECK)
    if bulk.position:
        return formatting.badge(State.RUNNING, _("At work"), formatting.PLAY)
    return formatting.badge(State.READY, _("Waits"), formatting.LINES)


@admin.register(BulkAct)
class BulkActAdmin(ReadingAdmin):
    """Bulk acts, the newest first. An operator may always look at their own."""

    list_display = (
        "called",
        "standing",
        "asked_for",
        "username",
        "found",
        "was_changed",
        "had_moved_on",
        "asked",
        "ended",
    )
    ordering = ("-id",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return all bulk acts, or their own to those who see only some jobs.

        Other bulk acts would tell them of jobs that they may not see.
        """
        found: QuerySet[Any] = super().get_queryset(request)
        if sight.limits_jobs(request, self.admin_site):
            found = found.filter(site=self.admin_site.name, user_id=str(request.user.pk))
        may_see = Value(sight.may_view_payload(request, self.admin_site))
        # For the columns, which do not know the request.
        annotated: QuerySet[Any] = found.annotate(sees_payload=may_see)
        return annotated

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow all to those with the permission, and to everybody their own."""
        own = obj is not None and obj.user_id == str(request.user.pk)
        return own or super().has_view_permission(request, obj)

    called = column(gettext_lazy("act"), _label)
    standing = column(gettext_lazy("state"), _badge)
    asked_for = column(gettext_lazy("filter"), filter_text)
    found = named_column(gettext_lazy("found"), _found)
    was_changed = number_column(gettext_lazy("changed"), "changed")
    had_moved_on = number_column(gettext_lazy("had moved on"), "skipped")
    asked = age_column(gettext_lazy("asked"), "created_at")
    ended = age_column(gettext_lazy("ended"), "finished_at")

    def get_urls(self) -> list[URLPattern]:
        """Add the addresses of the progress, which the page fetches repeatedly, and of the end."""
        view = self.admin_site.admin_view
        return [
            path(
                "<int:bulk_id>/progress/", view(self.progress_view), name=self.url_name("progress")
            ),
            path("<int:bulk_id>/end/", view(self.end_view), name=self.url_name("end")),
            *super().get_urls(),
        ]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show the progress of a bulk act. No form changes it."""
        bulk = self.find_row(request, unquote(object_id))
        if request.method not in {"GET", "HEAD"}:
            return HttpResponseNotAllowed(["GET", "HEAD"])
        action = job_action(bulk.act)
        return self.respond(
            request,
            "acts/bulk.html",
            **self._progress(request, bulk),
            title=_label(bulk),
            effect="" if action is None else action.effect,
            may_list=self.has_view_permission(request),
            may_end=self._may_end(request, action),
            list_url=self.address_of("changelist"),
            progress_url=self.address_of("progress", bulk.pk),
            end_url=self.address_of("end", bulk.pk),
            filter_url=self._filter_url(bulk),
            filter_text=filter_text(bulk),
            job_url=self._job_url(request, bulk),
        )

    def progress_view(self, request: HttpRequest, bulk_id: int) -> HttpResponse:
        """Return the part of the page that changes: headline, bar and numbers."""
        bulk = self.find_row(request, bulk_id)
        context = self._progress(request, bulk)
        return TemplateResponse(request, "admin/relay_queue/acts/progress.html", context)

    def end_view(self, request: HttpRequest, bulk_id: int) -> HttpResponse:
        """End a bulk act after the batch that is under way."""
        bulk = self.find_row(request, bulk_id)
        if request.method != "POST":
            return pressed_nothing(request, self.address_of("change", bulk.pk))
        if not self._may_end(request, job_action(bulk.act)):
            raise PermissionDenied
        ended = attempt(request, lambda: _end(bulk, request.user.pk))
        if ended:
            messages.success(request, _("It is ended. What was done stays done."))
        elif ended is not None:
            messages.warning(request, _("It was over already."))
        return redirect(self.address_of("change", bulk.pk))

    def _may_end(self, request: HttpRequest, action: Action | None) -> bool:
        """Ask the page of jobs at this site, as for the action itself; no for one that is gone."""
        if action is None:
            return False
        page = sight.page_of(self.admin_site, Job)
        ask = getattr(page, "may_perform", None)
        return bool(request.user.has_perm(action.codename) if ask is None else ask(request, action))

    def _filter_url(self, bulk: BulkAct) -> str:
        """Return the address of the filtered list; empty if this release has no such list."""
        name = bulk.listing.replace(".", "_")
        if _is_secret(bulk):
            return ""
        try:
            return f"{reverse(f'{self.admin_site.name}:{name}_changelist')}?{bulk.filters}"
        except NoReverseMatch:
            return ""

    def _job_url(self, request: HttpRequest, bulk: BulkAct) -> str:
        site = self.admin_site
        if bulk.job_id is None or not sight.jobs(request, site).filter(pk=bulk.job_id).exists():
            return ""
        return Links(request, site).job(bulk.job_id)

    def _progress(self, request: HttpRequest, bulk: BulkAct) -> dict[str, Any]:
        may_see = sight.may_view_payload(request, self.admin_site)
        more = _("more than %s") % f"{MOST_COUNTED:,}"
        return {
            "bulk": bulk,
            "headline": _headline(bulk, may_see),
            "dealt_with": bulk.changed + bulk.skipped,
            "changed": f"{bulk.changed:,}",
            "skipped": f"{bulk.skipped:,}",
            "found": more if bulk.matched is None else f"{bulk.matched:,}",
        }


def _end(bulk: BulkAct, user_id: Any) -> bool:
    with store.transaction() as tx:
        ended = store.cancel_bulk(tx, bulk.pk)
        if ended:
            record_progress(user_id, bulk, "ended by hand")
    return ended


def _headline(bulk: BulkAct, may_see_payload: bool) -> str:
    """Return one sentence on the state of a bulk act, and why it does not go on if it does not."""
    if bulk.cancelled_at is not None:
        return _("Ended by hand. What was done stays done.")
    if bulk.stop_reason:
        return _("Stopped: %s") % bulk.stop_reason
    if bulk.finished_at is not None:
        return _("Done.")
    job = Job.objects.using(conf.get().database).filter(pk=bulk.job_id or 0).first()
    if job is None or job.state == State.RUNNING:
        return _("At work …")
    if job.state in TERMINAL:
        return _("Nobody goes on with it: its job is %(state)s. %(error)s") % {
            "state": State(job.state).label.lower(),
            "error": job.last_error if may_see_payload else "",
        }
    return _("Waits for a worker that serves the queue %s.") % job.queue
