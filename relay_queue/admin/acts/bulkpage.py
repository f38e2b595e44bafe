"""The pages of bulk acts: which there were, and how far one has got."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import SEARCH_VAR
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet, Value
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue import conf, store
from relay_queue.admin import badges, cells, sight, words
from relay_queue.admin.acts import audit
from relay_queue.admin.acts.catalogue import Act, job_act
from relay_queue.admin.acts.doing import attempt
from relay_queue.admin.acts.matching import MOST_COUNTED
from relay_queue.admin.acts.pages import pressed_nothing
from relay_queue.admin.dashboard.links import Links
from relay_queue.admin.lists import searching
from relay_queue.admin.reading import ReadingAdmin
from relay_queue.models import BulkAct, Job
from relay_queue.states import TERMINAL, State


@admin.register(BulkAct)
class BulkActAdmin(ReadingAdmin):
    """Bulk acts, the newest first. Whoever has asked for one may always look at that one."""

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
        """Leave those who see only some jobs their own: the others tell of jobs that they do not see."""
        found: QuerySet[Any] = super().get_queryset(request)
        if sight.limits_jobs(request, self.admin_site):
            found = found.filter(site=self.admin_site.name, user_id=str(request.user.pk))
        may_see = Value(sight.may_view_payload(request, self.admin_site))
        # For the columns, which are not told who looks.
        told: QuerySet[Any] = found.annotate(sees_payload=may_see)
        return told

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Those with the permission see all, and everybody sees their own."""
        own = obj is not None and obj.user_id == str(request.user.pk)
        return own or super().has_view_permission(request, obj)

    @admin.display(description=gettext_lazy("act"))
    def called(self, bulk: BulkAct) -> str:
        """Show the act by its label, which leads to its page."""
        return _label(bulk)

    @admin.display(description=gettext_lazy("state"))
    def standing(self, bulk: BulkAct) -> SafeString:
        """Show how it stands, and why it was stopped."""
        return _badge(bulk)

    @admin.display(description=gettext_lazy("filter"))
    def asked_for(self, bulk: BulkAct) -> str:
        """Show which jobs were meant."""
        return filter_text(bulk)

    @admin.display(description=gettext_lazy("found"))
    def found(self, bulk: BulkAct) -> SafeString:
        """Show how many there were at the start."""
        if bulk.matched is None:
            return cells.labelled(gettext_lazy("found"), f"> {words.number(MOST_COUNTED)}")
        return cells.count(gettext_lazy("found"), bulk.matched)

    @admin.display(description=gettext_lazy("changed"))
    def was_changed(self, bulk: BulkAct) -> SafeString:
        """Show how many were changed."""
        return cells.count(gettext_lazy("changed"), bulk.changed)

    @admin.display(description=gettext_lazy("had moved on"))
    def had_moved_on(self, bulk: BulkAct) -> SafeString:
        """Show how many were left alone."""
        return cells.count(gettext_lazy("had moved on"), bulk.skipped)

    @admin.display(description=gettext_lazy("asked"))
    def asked(self, bulk: BulkAct) -> SafeString:
        """Show when it was asked for."""
        return cells.labelled(gettext_lazy("asked"), cells.ago(bulk.created_at, cells.now()))

    @admin.display(description=gettext_lazy("ended"))
    def ended(self, bulk: BulkAct) -> SafeString:
        """Show when it ended."""
        return cells.labelled(gettext_lazy("ended"), cells.ago(bulk.finished_at, cells.now()))

    def get_urls(self) -> list[URLPattern]:
        """Add the progress, which the page fetches again and again, and the end."""
        view = self.admin_site.admin_view
        return [
            path("<int:bulk_id>/progress/", view(self.progress_view), name=self._name("progress")),
            path("<int:bulk_id>/end/", view(self.end_view), name=self._name("end")),
            *super().get_urls(),
        ]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show how far a bulk act has got. There is nothing to change by a form."""
        bulk = self._find(request, unquote(object_id))
        if request.method not in {"GET", "HEAD"}:
            return HttpResponseNotAllowed(["GET", "HEAD"])
        act = job_act(bulk.act)
        context = {
            **self.admin_site.each_context(request),
            **self._progress(request, bulk),
            "title": _label(bulk),
            "effect": "" if act is None else act.effect,
            "opts": self.opts,
            "media": self.media,
            "may_list": self.has_view_permission(request),
            "may_end": act is not None and self._may_end(request, act),
            "list_url": self._reverse("changelist"),
            "progress_url": self._reverse("progress", bulk.pk),
            "end_url": self._reverse("end", bulk.pk),
            "filter_url": self._filter_url(bulk),
            "filter_text": filter_text(bulk),
            "job_url": self._job_url(request, bulk),
        }
        return TemplateResponse(request, "admin/relay_queue/acts/bulk.html", context)

    def progress_view(self, request: HttpRequest, bulk_id: int) -> HttpResponse:
        """Return the numbers alone."""
        bulk = self._find(request, bulk_id)
        context = self._progress(request, bulk)
        return TemplateResponse(request, "admin/relay_queue/acts/progress.html", context)

    def end_view(self, request: HttpRequest, bulk_id: int) -> HttpResponse:
        """End a bulk act after the batch that is being done."""
        bulk = self._find(request, bulk_id)
        if request.method != "POST":
            return pressed_nothing(request, self._reverse("change", bulk.pk))
        act = job_act(bulk.act)
        if act is None or not self._may_end(request, act):
            raise PermissionDenied
        ended = attempt(request, lambda: _end(bulk, request.user.pk))
        if ended:
            messages.success(request, _("It is ended. What was done stays done."))
        elif ended is not None:
            messages.warning(request, _("It was over already."))
        return redirect(self._reverse("change", bulk.pk))

    def _may_end(self, request: HttpRequest, act: Act) -> bool:
        """Ask the page of jobs at this site, as for the act itself."""
        page = sight.page_of(self.admin_site, Job)
        ask = getattr(page, "may_act", None)
        return bool(request.user.has_perm(act.codename) if ask is None else ask(request, act))

    def _find(self, request: HttpRequest, bulk_id: Any) -> BulkAct:
        bulk = self.get_object(request, str(bulk_id))
        if bulk is None:
            raise Http404
        if not self.has_view_permission(request, bulk):
            raise PermissionDenied
        return bulk  # type: ignore[no-any-return]

    def _filter_url(self, bulk: BulkAct) -> str:
        """Return the list that the act is about, which other releases may have called otherwise."""
        name = bulk.listing.replace(".", "_")
        if _is_secret(bulk):
            return ""
        try:
            return f"{reverse(f'{self.admin_site.name}:{name}_changelist')}?{bulk.filters}"
        except NoReverseMatch:
            return ""

    def _job_url(self, request: HttpRequest, bulk: BulkAct) -> str:
        site = self.admin_site
        if bulk.job_id is None or not sight.may_view(request, site, Job):
            return ""
        if not sight.jobs(request, site).filter(pk=bulk.job_id).exists():
            return ""
        return Links(request, site).job(bulk.job_id)

    def _progress(self, request: HttpRequest, bulk: BulkAct) -> dict[str, Any]:
        may_see = sight.may_view_payload(request, self.admin_site)
        return {
            "bulk": bulk,
            "headline": _headline(bulk, may_see),
            "dealt_with": bulk.changed + bulk.skipped,
            "changed": f"{bulk.changed:,}",
            "skipped": f"{bulk.skipped:,}",
            "found": _("more than %s") % f"{MOST_COUNTED:,}"
            if bulk.matched is None
            else f"{bulk.matched:,}",
        }

    def _name(self, page: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"

    def _reverse(self, page: str, *args: Any) -> str:
        return reverse(f"{self.admin_site.name}:{self._name(page)}", args=args)


def filter_text(bulk: Any) -> str:
    """Say in words which jobs a bulk act is for: its filters, as the address of the list has them.

    What was searched for in keys and errors is left out for those who may not view such texts.
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


def _label(bulk: BulkAct) -> str:
    act = job_act(bulk.act)
    return bulk.act if act is None else str(act.label)


def _badge(bulk: BulkAct) -> SafeString:
    if bulk.cancelled_at is not None:
        return badges.badge(State.CANCELLED, _("Ended by hand"), badges.SLASHED)
    if bulk.stop_reason:
        why = cells.error(bulk.stop_reason)
        stopped = badges.badge(State.DEAD, _("Stopped"), badges.CROSS)
        return format_html("{}<br>{}", stopped, why)
    if bulk.finished_at is not None:
        return badges.badge(State.SUCCEEDED, _("Done"), badges.CHECK)
    if bulk.position:
        return badges.badge(State.RUNNING, _("At work"), badges.PLAY)
    return badges.badge(State.READY, _("Waits"), badges.LINES)


def _end(bulk: BulkAct, user_id: Any) -> bool:
    with store.transaction() as tx:
        ended = store.cancel_bulk(tx, bulk.pk)
        if ended:
            row = (bulk.pk, str(bulk), "progress to ended by hand")
            audit.record(user_id, BulkAct, [row], bulk.act)
    return ended


def _headline(bulk: BulkAct, may_see_payload: bool) -> str:
    """Say how it stands; if nothing moves, why."""
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
