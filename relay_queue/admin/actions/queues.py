"""The actions on queues: pause, resume, and the limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue import store
from relay_queue.admin.actions import audit
from relay_queue.admin.actions.catalogue import APP, QUEUE_ACTIONS, Action
from relay_queue.admin.actions.pages import Actions
from relay_queue.admin.actions.perform import attempt
from relay_queue.models import Queue
from relay_queue.operations import SET_LIMITS
from relay_queue.quantities import number
from relay_queue.store.queues import MAX_LIMIT

(LIMITS,) = SET_LIMITS.buttons
LIMIT_QUEUE = f"{APP}.{LIMITS.permission}"


class LimitsForm(forms.Form):
    """The limits of one queue. The form sends the shown limits along, to find the changes."""

    capacity = forms.IntegerField(
        label=gettext_lazy("Capacity"),
        required=False,
        show_hidden_initial=True,
        min_value=0,
        max_value=MAX_LIMIT,
        help_text=gettext_lazy("Unfinished jobs that the queue admits. Empty: no limit."),
    )
    max_running = forms.IntegerField(
        label=gettext_lazy("Max running"),
        required=False,
        show_hidden_initial=True,
        min_value=0,
        max_value=MAX_LIMIT,
        help_text=gettext_lazy("Jobs of the queue that may run at once. Empty: no limit."),
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


class QueueActions(Actions):
    """Adds the actions on queues to their list and to the page of a queue."""

    row_actions: ClassVar[tuple[Action, ...]] = QUEUE_ACTIONS
    actions_model = Queue

    def get_urls(self) -> list[URLPattern]:
        """Add the page of the limits."""
        view = self.admin_site.admin_view(self.limits_view)
        name = f"{self.opts.app_label}_{self.opts.model_name}_limits"
        return [path("<path:object_id>/limits/", view, name=name), *super().get_urls()]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """Show the link to the limits to those who may set them."""
        row = options.get("obj")
        if row is not None and self.has_limit_queue_permission(request):
            context["relay_limits_url"] = self._reverse("limits", quote(row.pk))
        return super().render_change_form(request, context, *args, **options)

    def has_limit_queue_permission(self, request: HttpRequest) -> bool:
        """Ask for the permission to set limits."""
        return bool(request.user.has_perm(LIMIT_QUEUE))

    def limits_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the limits of a queue in a form, and set them on POST."""
        if not self.has_limit_queue_permission(request):
            raise PermissionDenied
        queue = self.get_object(request, unquote(object_id))
        if queue is None:
            raise Http404
        if not self.has_view_permission(request, queue):
            raise PermissionDenied
        names = {"capacity": queue.capacity, "max_running": queue.max_running}
        form = LimitsForm(request.POST or None, initial=names)
        page = self._reverse("change", quote(queue.pk))
        if request.method == "POST" and form.is_valid():
            overtaken = attempt(request, lambda: _set_limits(queue, form, request.user.pk))
            if not overtaken:
                if overtaken is not None:
                    messages.success(request, _("The limits of queue %s are set.") % queue)
                return redirect(page)
            form = form.overtaken(overtaken)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Limits of queue %s") % queue,
            "opts": self.opts,
            "row": queue,
            "form": form,
            "back": page,
            "media": self.media,
        }
        return TemplateResponse(request, "admin/relay_queue/acts/limits.html", context)


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
            audit.record(user_id, Queue, [(queue.pk, str(queue), change)], LIMITS.name, changes)
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
