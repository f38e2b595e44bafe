"""Buttons and actions: how actions get onto the list and onto the page of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import BadRequest, PermissionDenied, ValidationError
from django.db.models import Model, QuerySet
from django.forms import Form
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.shortcuts import redirect
from django.urls import URLPattern, path
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from relay_queue.admin import sight
from relay_queue.admin.actions.catalogue import Action, Done
from relay_queue.admin.actions.perform import attempt, perform, report_result
from relay_queue.store.operate import BATCH
from relay_queue.validation import is_storable

if TYPE_CHECKING:
    from relay_queue.admin.reading import ReadingAdmin as Base
else:
    Base = object

CONFIRMED = "confirmed"
SHOWN_ON_CONFIRMATION = 10


@dataclass(frozen=True, slots=True)
class Button:
    """An action on the page of one row. ``why_not`` is empty if the row can take it now."""

    name: str
    label: Any
    url: str
    dangerous: bool
    why_not: Any


class Actions(Base):
    """Adds ``row_actions`` on rows of ``actions_model`` to a page that otherwise only reads.

    Only a POST with the CSRF token, and with the permission of the action, changes anything.
    """

    row_actions: ClassVar[tuple[Action, ...]] = ()
    actions_model: ClassVar[type[Model]]
    change_form_template = "admin/relay_queue/acts/change_form.html"

    def __init_subclass__(cls, **options: Any) -> None:
        """Offer each action in the list, to those who have its permission."""
        super().__init_subclass__(**options)
        if "row_actions" in vars(cls):
            cls.actions = [_on_selection(action) for action in cls.row_actions]
            for action in cls.row_actions:
                # Where Django's admin looks for the permission of an action.
                setattr(cls, f"has_{action.permission}_permission", _has_permission(action))

    def get_urls(self) -> list[URLPattern]:
        """Add the address that the buttons post to."""
        view, name = self.admin_site.admin_view(self.action_view), self.url_name("act")
        # Before Django's own addresses, whose last one matches everything.
        return [path("<path:object_id>/act/<slug:name>/", view, name=name), *super().get_urls()]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """Give the page of a row its buttons."""
        row = options.get("obj")
        buttons = [] if row is None else self.action_buttons(request, row)
        context["relay_acts"] = buttons
        context["relay_acts_refuse"] = any(button.why_not for button in buttons)
        return super().render_change_form(request, context, *args, **options)

    def action_buttons(self, request: HttpRequest, row: Any) -> list[Button]:
        """Return the actions that this person may perform, each with why the row cannot take it."""
        return [
            Button(
                action.name,
                action.label,
                self.address_of("act", quote(row.pk), action.name),
                action.dangerous,
                action.why_not(row),
            )
            for action in self.row_actions
            if self.may_perform(request, action)
        ]

    def may_perform(self, request: HttpRequest, action: Action) -> bool:
        """Say whether this person may perform an action.

        Decided by ``has_<permission>_permission``, which a project may override as Django's own.
        """
        return bool(getattr(self, f"has_{action.permission}_permission")(request))

    def action_view(self, request: HttpRequest, object_id: str, name: str) -> HttpResponse:
        """Perform one action on one row, after a confirmation if the action asks for one."""
        action = next((action for action in self.row_actions if action.name == name), None)
        if action is None:
            raise Http404
        if request.method != "POST":
            return pressed_nothing(request, self.address_of("change", quote(unquote(object_id))))
        if not self.may_perform(request, action):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if not self.has_view_permission(request, row):
            raise PermissionDenied
        if row is None:
            text = _("%(one)s %(key)s is not there any more. Nothing was done.")
            one = capfirst(str(self.opts.verbose_name))
            messages.warning(request, text % {"one": one, "key": unquote(object_id)})
            return redirect(self.address_of("changelist"))
        form = self.asked(request, action)
        if not self.confirmed(request, action, form):
            back = self.address_of("change", quote(row.pk))
            return self.confirm(request, action, form, rows=[row], count=1, back=back)
        self.perform_and_report(request, action, [row.pk], form)
        if action.deletes and self.get_object(request, unquote(object_id)) is None:
            return redirect(self.address_of("changelist"))
        return redirect(self.address_of("change", quote(row.pk)))

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **options: Any
    ) -> HttpResponse | None:
        """Refuse keys that no row can have, at which Django would fail."""
        try:
            for key in request.POST.getlist(ACTION_CHECKBOX_NAME):
                self.opts.pk.clean(key, None)
                if not is_storable(key):
                    raise ValidationError(_("No row has a NUL character in its key."))
        except ValidationError as error:
            raise BadRequest(error) from error
        return super().response_action(request, queryset, *args, **options)

    def perform_on_selection(
        self, request: HttpRequest, action: Action, listed: QuerySet[Any]
    ) -> HttpResponse | None:
        """Perform an action on the rows that were ticked, after a confirmation if it asks for one.

        The keys are not filtered by the list: a row that has left it meanwhile is to be named.
        """
        convert = self.opts.pk.to_python
        keys = [convert(key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME)][:BATCH]
        if request.POST.get("select_across") == "1":
            keys = list(listed.order_by("pk").values_list("pk", flat=True)[:BATCH])
        form = self.asked(request, action)
        if self.confirmed(request, action, form):
            self.perform_and_report(request, action, keys, form)
            return None
        rows = self.get_queryset(request).filter(pk__in=keys).order_by("pk")
        hidden = [
            ("action", action.name),
            *self.tokens(request),
            *((ACTION_CHECKBOX_NAME, key) for key in keys),
        ]
        shown = rows.defer(*action.heavy)[:SHOWN_ON_CONFIRMATION]
        return self.confirm(request, action, form, rows=shown, count=len(keys), hidden=hidden)

    def tokens(self, request: HttpRequest) -> Sequence[tuple[str, Any]]:
        """Return hidden fields of a question by which a second answer is recognised."""
        return ()

    def asked(self, request: HttpRequest, action: Action) -> Form | None:
        """Return the form of an action, filled in if it was sent."""
        if action.form is None:
            return None
        return action.form(request.POST) if CONFIRMED in request.POST else action.form()

    def confirmed(self, request: HttpRequest, action: Action, form: Form | None) -> bool:
        """Say whether the action can be performed without another question."""
        if form is not None:
            return form.is_valid()
        return not action.dangerous or CONFIRMED in request.POST

    def confirm(
        self,
        request: HttpRequest,
        action: Action,
        form: Form | None,
        *,
        rows: Iterable[Model],
        count: int,
        back: str = "",
        hidden: Sequence[tuple[str, Any]] = (),
        beyond: bool = False,
        **more: Any,
    ) -> HttpResponse:
        """Ask whether to perform the action. Nothing has been changed."""
        shown = list(rows)
        return self.respond(
            request,
            "acts/confirm.html",
            title=f"{action.label}: {self._counted(count, beyond)}",
            act=action,
            form=form,
            rows=shown,
            count=count,
            beyond=beyond,
            more=f"{count - len(shown):,}" if count > len(shown) else "",
            hidden=[*hidden, (CONFIRMED, "yes")],
            back=back or request.get_full_path(),
            **more,
        )

    def perform_and_report(
        self, request: HttpRequest, action: Action, keys: Sequence[Any], form: Form | None
    ) -> None:
        """Perform the action and report the result; rows that are hidden count as missing."""
        seen = set(self._visible(request).filter(pk__in=keys).values_list("pk", flat=True))
        given = {} if form is None else form.cleaned_data
        wanted = [key for key in keys if key in seen]
        done = attempt(request, lambda: self.perform(request, action, wanted, given))
        if done is not None:
            report_result(request, action, self.actions_model, keys, done)

    def perform(
        self, request: HttpRequest, action: Action, keys: Sequence[Any], given: dict[str, Any]
    ) -> Done:
        """Perform the action on rows that this person may see. Raises what the store raises."""
        return perform(action, request.user.pk, self.actions_model, keys, given)

    def _visible(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows of the whole table that this person may see; this list may show fewer."""
        page: Any = sight.page_of(self.admin_site, self.actions_model)
        if page is None or not page.has_view_permission(request):
            return self.get_queryset(request)
        rows: QuerySet[Any] = page.get_queryset(request)
        return rows

    def _counted(self, count: int, beyond: bool) -> str:
        opts = self.opts
        name = opts.verbose_name if count == 1 and not beyond else opts.verbose_name_plural
        text = _("more than %(n)s %(name)s") if beyond else _("%(n)s %(name)s")
        return text % {"n": f"{count:,}", "name": name}


def pressed_nothing(request: HttpRequest, page: str) -> HttpResponse:
    """Redirect a GET for the address of an action to the page of its button, with a message."""
    if request.method not in {"GET", "HEAD"}:
        return HttpResponseNotAllowed(["POST"])
    messages.info(request, _("Nothing was done: that address only takes the press of a button."))
    return redirect(page)


def _on_selection(
    action: Action,
) -> Callable[[Any, HttpRequest, QuerySet[Any]], HttpResponse | None]:
    """Return an action as the function that Django's list calls for it."""

    def perform(page: Actions, request: HttpRequest, listed: QuerySet[Any]) -> HttpResponse | None:
        return page.perform_on_selection(request, action, listed)

    perform.__name__ = action.name
    perform.short_description = action.label  # type: ignore[attr-defined]
    perform.allowed_permissions = (action.permission,)  # type: ignore[attr-defined]
    return perform


def _has_permission(action: Action) -> Callable[[Any, HttpRequest], bool]:
    def has_permission(page: Actions, request: HttpRequest) -> bool:
        return request.user.has_perm(action.codename)

    return has_permission
