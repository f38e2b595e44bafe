"""Queues: the list with the jobs in each from the counters, the page of one, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import OuterRef, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue import store
from relay_queue.admin import formatting, sight
from relay_queue.admin.actions.catalogue import APP, QUEUE_ACTIONS, Action
from relay_queue.admin.actions.pages import Actions
from relay_queue.admin.actions.perform import attempt, record
from relay_queue.admin.dashboard import charts, panels
from relay_queue.admin.dashboard.links import Links, counted, linked
from relay_queue.admin.formatting import Fact, column, named_column, number_column
from relay_queue.admin.reading import DetailAdmin
from relay_queue.models import Job, Queue, QueueCount, Worker
from relay_queue.operations import SET_LIMITS
from relay_queue.quantities import duration, number, percent
from relay_queue.query import history, status
from relay_queue.query.history import RecentStats
from relay_queue.query.status import LOOKED_AT_FOR_OLDEST, QueueStatus
from relay_queue.states import UNFINISHED, State
from relay_queue.store.queues import MAX_LIMIT

(LIMITS,) = SET_LIMITS.buttons

MOST_NEXT: Final = 5
NEXT_LOOKED_AT: Final = 100
"""Jobs next in line that are checked for those that a person may see."""
MOST_WORKERS: Final = 20
WORKERS_LOOKED_AT: Final = 500


def _limit_field(label: Any, help_text: Any) -> forms.IntegerField:
    return forms.IntegerField(
        label=label,
        help_text=help_text,
        required=False,
        show_hidden_initial=True,
        min_value=0,
        max_value=MAX_LIMIT,
    )


class LimitsForm(forms.Form):
    """The limits of one queue. The form sends the shown limits along, to find the changes."""

    capacity = _limit_field(
        gettext_lazy("Capacity"),
        gettext_lazy("Unfinished jobs that the queue admits. Empty: no limit."),
    )
    max_running = _limit_field(
        gettext_lazy("Max running"),
        gettext_lazy("Jobs of the queue that may run at once. Empty: no limit."),
    )

    def shown(self, name: str) -> int | None:
        """Return the limit that the page showed; no limit for a text that it cannot have sent."""
        try:
            return self.fields[name].to_python(self.data.get(self[name].html_initial_name))
        except forms.ValidationError:
            return None

    def wanted(self) -> dict[str, int | None]:
        """Return the limits that differ from those that the page showed."""
        values = self.cleaned_data
        return {name: values[name] for name in self.fields if values[name] != self.shown(name)}

    def overtaken(self, now: Mapping[str, int | None]) -> LimitsForm:
        """Return the form for another try, with the limits that were set meanwhile."""
        data = dict(self.data.items())
        for name, value in now.items():
            data[self[name].html_initial_name] = "" if value is None else str(value)
        form = LimitsForm(data)
        for name, value in now.items():
            form.add_error(name, _overtaken(self.shown(name), value))
        return form


def _jobs(*states: State) -> Coalesce:
    counted = QueueCount.objects.filter(queue=OuterRef("name"), state__in=states)
    total = counted.order_by().values("queue").annotate(total=Sum("n")).values("total")
    return Coalesce(Subquery(total), 0)


COUNTS: Final = {
    "n_unfinished": _jobs(*UNFINISHED),
    "n_ready": _jobs(State.READY),
    "n_running": _jobs(State.RUNNING),
    "n_dead": _jobs(State.DEAD),
}
"""The numbers of jobs of a queue, from the counters."""


def _claims(queue: Queue) -> SafeString:
    """Return the badge of whether workers claim from a queue."""
    if queue.paused_at is None:
        return formatting.badge("running", _("Open"), formatting.PLAY)
    return formatting.badge("paused", _("Paused"), formatting.PAUSE)


@admin.register(Queue)
class QueueAdmin(Actions, DetailAdmin):
    """Queues by name, with the actions on them and the page of the limits of one."""

    row_actions: ClassVar[tuple[Action, ...]] = QUEUE_ACTIONS
    actions_model = Queue

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
    counter_columns = frozenset({"unfinished", "ready", "running", "dead"})
    search_fields = ("name",)
    change_form_template = "admin/relay_queue/queue.html"

    def detail(self, request: HttpRequest, shown: Queue) -> Mapping[str, object]:
        """Return the title and the facts of the page of one queue."""
        links, now = Links(request, self.admin_site), sight.now(request)
        return {
            "title": _("Queue %(name)s") % {"name": shown.pk},
            "queue": shown,
            "badge": _claims(shown),
            **_standing(request, shown, now, links),
            **_next(request, shown, now, links),
            **_workers(request, shown, now, links),
        }

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Add the numbers of jobs from the counters, which are few rows and exact."""
        return super().get_queryset(request).annotate(**COUNTS)  # type: ignore[no-any-return]

    unfinished = number_column(gettext_lazy("unfinished"), "n_unfinished")
    ready = number_column(gettext_lazy("ready"), "n_ready")
    running = number_column(gettext_lazy("running"), "n_running")
    dead = number_column(gettext_lazy("dead letters"), "n_dead")
    claims = column(gettext_lazy("claims"), _claims)
    jobs_admitted = number_column(gettext_lazy("capacity"), "capacity")
    leases_admitted = number_column(gettext_lazy("max running"), "max_running")
    aging = named_column(gettext_lazy("aging"), lambda queue: duration(queue.aging_seconds))

    def get_urls(self) -> list[URLPattern]:
        """Add the page of the limits."""
        view, name = self.admin_site.admin_view(self.limits_view), self.url_name("limits")
        return [path("<path:object_id>/limits/", view, name=name), *super().get_urls()]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """Show the link to the limits to those who may set them."""
        row = options.get("obj")
        if row is not None and self.has_limit_queue_permission(request):
            context["relay_limits_url"] = self.address_of("limits", quote(row.pk))
        return super().render_change_form(request, context, *args, **options)

    def has_limit_queue_permission(self, request: HttpRequest) -> bool:
        """Ask for the permission to set limits."""
        return bool(request.user.has_perm(f"{APP}.{LIMITS.permission}"))

    def limits_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the limits of a queue in a form, and set them on POST."""
        if not self.has_limit_queue_permission(request):
            raise PermissionDenied
        queue = self.find_row(request, unquote(object_id))
        initial = {"capacity": queue.capacity, "max_running": queue.max_running}
        form = LimitsForm(request.POST or None, initial=initial)
        back = self.address_of("change", quote(queue.pk))
        if request.method == "POST" and form.is_valid():
            overtaken = attempt(request, lambda: _set_limits(queue, form, request.user.pk))
            if not overtaken:
                if overtaken is not None:
                    messages.success(request, _("The limits of queue %s are set.") % queue)
                return redirect(back)
            form = form.overtaken(overtaken)
        title = _("Limits of queue %s") % queue
        return self.respond(
            request, "acts/limits.html", title=title, row=queue, form=form, back=back
        )


def _standing(request: HttpRequest, queue: Queue, now: datetime, links: Links) -> dict[str, Any]:
    """Return limits, depths and the last hour, for those who may see all counted jobs."""
    if not sight.counters_tell(request, links.site, Queue):
        limits = ((_("Capacity"), queue.capacity), (_("Max running"), queue.max_running))
        shown = [Fact(name, _("no limit") if n is None else number(n)) for name, n in limits]
        return {"may_see_counts": False, "facts": [*shown, *_settings(queue, now)]}
    found = status.queue_status(queue, now)
    hour = history.recent(now, queue=queue.pk)
    return {
        "may_see_counts": True,
        "capacity": panels.capacity_meter(found.unfinished, queue.capacity),
        "running": panels.running_meter(found.counts.get(State.RUNNING, 0), queue.max_running),
        "facts": [_oldest_wait(found), *_settings(queue, now)],
        "depths": [
            (formatting.state_badge(state), counted(found.counts.get(state, 0), address))
            for state in State
            for address in [links.jobs(state, queue.pk)]
        ],
        "pieces": panels.pieces(found, found.unfinished),
        "lately": _lately(hour),
        "chart": charts.last_hour(hour.spans),
    }


def _oldest_wait(found: QueueStatus) -> Fact:
    waited = duration(found.oldest_wait_seconds)
    if found.counts.get(State.READY, 0) > LOOKED_AT_FOR_OLDEST:
        waited = f"≥ {waited}"
    return Fact(_("Oldest wait"), waited)


def _settings(queue: Queue, now: datetime) -> list[Fact]:
    aging = _("none: strict priority")
    if queue.aging_seconds is not None:
        aging = _("one class in %(time)s") % {"time": duration(queue.aging_seconds)}
    facts = [Fact(_("Aging"), aging)]
    if queue.paused_at is not None:
        facts.append(Fact(_("Paused"), formatting.ago(queue.paused_at, now)))
    return [*facts, Fact(_("Created"), formatting.ago(queue.created_at, now))]


def _lately(hour: RecentStats) -> list[Fact]:
    done = history.total(hour.spans)
    facts = [
        Fact(_("Succeeded"), number(done.succeeded)),
        Fact(_("Failed attempts"), f"{number(done.failed)} ({percent(done.failure_rate)})"),
        Fact(_("Retried"), number(done.retried)),
        Fact(_("Died"), number(done.died)),
    ]
    for name, histogram in ((_("Wait"), hour.wait), (_("Run"), hour.run)):
        shown = " · ".join(" ".join(pair) for pair in panels.percentiles(histogram)[:2])
        facts.append(Fact(name, shown if histogram.total else "–"))
    return facts


def _next(request: HttpRequest, queue: Queue, now: datetime, links: Links) -> dict[str, Any]:
    """Return the jobs next in line, for those who may view jobs."""
    if not sight.may_view(request, links.site, Job):
        return {"may_see_jobs": False}
    pks = status.next_in_line(queue.pk, NEXT_LOOKED_AT)
    jobs = sight.jobs(request, links.site).defer("payload", "result")
    if not sight.limits_jobs(request, links.site):
        pks = pks[:MOST_NEXT]
    seen = jobs.in_bulk(pks)
    found: list[Any] = [seen[pk] for pk in pks if pk in seen][:MOST_NEXT]
    for job in found:
        job.aging_seconds = queue.aging_seconds
    return {
        "may_see_jobs": True,
        "next": [
            {
                "job": linked(job.pk, links.job(job.pk)),
                "task": formatting.task(job),
                "priority": formatting.priority(job, now),
                "waits": formatting.moment(
                    job.available_at, formatting.passed(job.available_at, now)
                ),
            }
            for job in found
        ],
        "ready_url": links.jobs(State.READY, queue.pk),
    }


def _workers(request: HttpRequest, queue: Queue, now: datetime, links: Links) -> dict[str, Any]:
    """Return the workers that serve the queue, for those who may view workers."""
    if not sight.may_view(request, links.site, Worker):
        return {"may_see_workers": False}
    live = sight.rows(request, links.site, Worker).filter(stopped_at__isnull=True)
    live = live.order_by("name", "id")[:WORKERS_LOOKED_AT]
    serving = [row for row in live if status.serves(row, queue.pk)]
    shown = [
        (
            linked(row, links.worker(row.pk)),
            panels.worker_badge(row, (now - row.heartbeat_at).total_seconds()),
        )
        for row in serving[:MOST_WORKERS]
    ]
    more = len(serving) - len(shown)
    return {"may_see_workers": True, "workers": shown, "more_workers": more}


def _set_limits(queue: Queue, form: LimitsForm, user_id: Any) -> dict[str, int | None]:
    """Set the limits that differ, unless another operator has changed one of them meanwhile.

    Returns the limits that were changed meanwhile, with their present values; if there are any,
    nothing is set.
    """
    with store.transaction() as tx:
        now, wanted = store.hold_limits(tx, queue.pk), form.wanted()
        changes = {name: value for name, value in wanted.items() if now[name] != value}
        overtaken = {name: now[name] for name in changes if now[name] != form.shown(name)}
        if changes and not overtaken:
            store.set_limits(tx, queue.pk, **changes)
            change = ", ".join(f"{name} to {value}" for name, value in changes.items())
            record(user_id, Queue, [(queue.pk, str(queue), change)], LIMITS.name, changes)
    return overtaken


def _overtaken(shown: int | None, now: int | None) -> str:
    text = _(
        "Nothing was changed: this page showed %(shown)s, and somebody has set %(now)s meanwhile. "
        "Set it once more to replace that."
    )
    said = {
        name: _("no limit") if value is None else number(value)
        for name, value in (("shown", shown), ("now", now))
    }
    return text % said
