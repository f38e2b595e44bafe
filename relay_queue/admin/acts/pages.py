"""Buttons and actions: how the acts come onto the list and the page of a row."""

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
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from relay_queue.admin import sight
from relay_queue.admin.acts.catalogue import Act, Done
from relay_queue.admin.acts.doing import BATCH, attempt, do, tell
from relay_queue.validation import is_storable

if TYPE_CHECKING:
    from relay_queue.admin.reading import ReadingAdmin as Base
else:
    Base = object

CONFIRMED = "confirmed"
SHOWN_ON_CONFIRMATION = 10


@dataclass(frozen=True, slots=True)
class Button:
    """An act on the page of one row. ``why_not`` is empty if it can be done now."""

    name: str
    label: Any
    url: str
    dangerous: bool
    why_not: Any


class Acts(Base):
    """Adds ``acts`` on rows of ``acts_model`` to a page that otherwise only reads.

    Nothing is changed but by POST, with the CSRF token and with the permission of the act.
    """

    acts: ClassVar[tuple[Act, ...]] = ()
    acts_model: ClassVar[type[Model]]
    change_form_template = "admin/relay_queue/acts/change_form.html"

    def __init_subclass__(cls, **options: Any) -> None:
        """Offer each act in the list, to those who have its permission."""
        super().__init_subclass__(**options)
        if "acts" in vars(cls):
            cls.actions = [_on_selection(act) for act in cls.acts]
            for act in cls.acts:
                # Where Django's admin looks for the permission of an action.
                setattr(cls, f"has_{act.permission}_permission", _has_permission(act))

    def get_urls(self) -> list[URLPattern]:
        """Add the address that the buttons post to."""
        view = self.admin_site.admin_view(self.act_view)
        name = f"{self.opts.app_label}_{self.opts.model_name}_act"
        # Before Django's own, whose last one takes everything.
        return [path("<path:object_id>/act/<slug:name>/", view, name=name), *super().get_urls()]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """Give the page of a row its buttons."""
        row = options.get("obj")
        buttons = [] if row is None else self.act_buttons(request, row)
        context["relay_acts"] = buttons
        context["relay_acts_refuse"] = any(button.why_not for button in buttons)
        return super().render_change_form(request, context, *args, **options)

    def act_buttons(self, request: HttpRequest, row: Any) -> list[Button]:
        """Return the acts that this person may do, with why one cannot be done to this row now."""
        return [
            Button(act.name, act.label, self.act_url(row, act), act.dangerous, act.why_not(row))
            for act in self.acts
            if self.may_act(request, act)
        ]

    def may_act(self, request: HttpRequest, act: Act) -> bool:
        """Say whether this person may do an act.

        Asked by ``has_<permission>_permission``, which a project may override as Django's own.
        """
        return bool(getattr(self, f"has_{act.permission}_permission")(request))

    def act_url(self, row: Model, act: Act) -> str:
        """Return where the button of an act posts to."""
        return self._reverse("act", quote(row.pk), act.name)

    def act_view(self, request: HttpRequest, object_id: str, name: str) -> HttpResponse:
        """Do one act to one row, after a confirmation if it wants one."""
        act = next((act for act in self.acts if act.name == name), None)
        if act is None:
            raise Http404
        if request.method != "POST":
            return pressed_nothing(request, self._reverse("change", quote(unquote(object_id))))
        if not self.may_act(request, act):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if not self.has_view_permission(request, row):
            raise PermissionDenied
        if row is None:
            text = _("%(one)s %(key)s is not there any more. Nothing was done.")
            one = capfirst(str(self.opts.verbose_name))
            messages.warning(request, text % {"one": one, "key": unquote(object_id)})
            return redirect(self._reverse("changelist"))
        form = self.asked(request, act)
        if not self.confirmed(request, act, form):
            back = self._reverse("change", quote(row.pk))
            return self.confirm(request, act, form, rows=[row], count=1, back=back)
        self.do_and_tell(request, act, [row.pk], form)
        if act.deletes and self.get_object(request, unquote(object_id)) is None:
            return redirect(self._reverse("changelist"))
        return redirect(self._reverse("change", quote(row.pk)))

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **options: Any
    ) -> HttpResponse | None:
        """Refuse keys that no row can have; Django would fail at them."""
        try:
            for key in request.POST.getlist(ACTION_CHECKBOX_NAME):
                self.opts.pk.clean(key, None)
                if not is_storable(key):
                    raise ValidationError(_("No row has a NUL character in its key."))
        except ValidationError as error:
            raise BadRequest(error) from error
        return super().response_action(request, queryset, *args, **options)

    def act_on_selection(
        self, request: HttpRequest, act: Act, listed: QuerySet[Any]
    ) -> HttpResponse | None:
        """Do an act to the rows that were ticked, after a confirmation if it wants one.

        Not to what the list holds of them: one that has left the list meanwhile is to be named.
        """
        convert = self.opts.pk.to_python
        keys = [convert(key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME)][:BATCH]
        if request.POST.get("select_across") == "1":
            keys = list(listed.order_by("pk").values_list("pk", flat=True)[:BATCH])
        form = self.asked(request, act)
        if self.confirmed(request, act, form):
            self.do_and_tell(request, act, keys, form)
            return None
        rows = self.get_queryset(request).filter(pk__in=keys).order_by("pk")
        hidden = [
            ("action", act.name),
            *self.tokens(request),
            *((ACTION_CHECKBOX_NAME, key) for key in keys),
        ]
        shown = rows.defer(*act.heavy)[:SHOWN_ON_CONFIRMATION]
        return self.confirm(request, act, form, rows=shown, count=len(keys), hidden=hidden)

    def tokens(self, request: HttpRequest) -> Sequence[tuple[str, Any]]:
        """Return what a question is to send along, so that its answer counts once."""
        return ()

    def asked(self, request: HttpRequest, act: Act) -> Form | None:
        """Return the form of an act, filled in if that was sent."""
        if act.form is None:
            return None
        return act.form(request.POST) if CONFIRMED in request.POST else act.form()

    def confirmed(self, request: HttpRequest, act: Act, form: Form | None) -> bool:
        """Say whether nothing more is to be asked."""
        if form is not None:
            return form.is_valid()
        return not act.confirm or CONFIRMED in request.POST

    def confirm(
        self,
        request: HttpRequest,
        act: Act,
        form: Form | None,
        *,
        rows: Iterable[Model],
        count: int,
        back: str = "",
        hidden: Sequence[tuple[str, Any]] = (),
        beyond: bool = False,
        **more: Any,
    ) -> HttpResponse:
        """Ask whether to do it. Nothing has been changed."""
        shown = list(rows)
        context = {
            **self.admin_site.each_context(request),
            "title": f"{act.label}: {self._counted(count, beyond)}",
            "opts": self.opts,
            "act": act,
            "form": form,
            "rows": shown,
            "count": count,
            "beyond": beyond,
            "more": f"{count - len(shown):,}" if count > len(shown) else "",
            "hidden": [*hidden, (CONFIRMED, "yes")],
            "back": back or request.get_full_path(),
            "media": self.media,
            **more,
        }
        return TemplateResponse(request, "admin/relay_queue/acts/confirm.html", context)

    def do_and_tell(
        self, request: HttpRequest, act: Act, keys: Sequence[Any], form: Form | None
    ) -> None:
        """Do it and say what became of it; rows that this person may not see are not there."""
        seen = set(self._visible(request).filter(pk__in=keys).values_list("pk", flat=True))
        given = {} if form is None else form.cleaned_data
        wanted = [key for key in keys if key in seen]
        done = attempt(request, lambda: self.do(request, act, wanted, given))
        if done is not None:
            tell(request, act, self.acts_model, keys, done)

    def do(
        self, request: HttpRequest, act: Act, keys: Sequence[Any], given: dict[str, Any]
    ) -> Done:
        """Do it to rows that this person may see. Raises what the store raises."""
        return do(act, request.user.pk, self.acts_model, keys, given)

    def _visible(self, request: HttpRequest) -> QuerySet[Any]:
        """Return what this person may see of the whole table, of which this list may be a part."""
        page: Any = sight.page_of(self.admin_site, self.acts_model)
        if page is None or not page.has_view_permission(request):
            return self.get_queryset(request)
        rows: QuerySet[Any] = page.get_queryset(request)
        return rows

    def _counted(self, count: int, beyond: bool) -> str:
        opts = self.opts
        name = opts.verbose_name if count == 1 and not beyond else opts.verbose_name_plural
        text = _("more than %(n)s %(name)s") if beyond else _("%(n)s %(name)s")
        return text % {"n": f"{count:,}", "name": name}

    def _reverse(self, page: str, *args: Any) -> str:
        name = f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return reverse(name, args=args)


def pressed_nothing(request: HttpRequest, page: str) -> HttpResponse:
    """Lead whoever opens the address of an act, from the history say, to the page of its button."""
    if request.method not in {"GET", "HEAD"}:
        return HttpResponseNotAllowed(["POST"])
    messages.info(request, _("Nothing was done: that address only takes the press of a button."))
    return redirect(page)


def _on_selection(act: Act) -> Callable[[Any, HttpRequest, QuerySet[Any]], HttpResponse | None]:
    """Return the act as an action of a list."""

    def action(page: Acts, request: HttpRequest, listed: QuerySet[Any]) -> HttpResponse | None:
        return page.act_on_selection(request, act, listed)

    action.__name__ = act.name
    action.short_description = act.label  # type: ignore[attr-defined]
    action.allowed_permissions = (act.permission,)  # type: ignore[attr-defined]
    return action


def _has_permission(act: Act) -> Callable[[Any, HttpRequest], bool]:
    def has_permission(page: Acts, request: HttpRequest) -> bool:
        return request.user.has_perm(act.codename)

    return has_permission
