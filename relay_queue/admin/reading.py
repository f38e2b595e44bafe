"""What all pages have in common: they only read, and they are quick on large tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.contrib import admin, messages
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.utils.functional import cached_property
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.admin import sight
from relay_queue.admin.lists import searching
from relay_queue.admin.lists.changelist import WalkChangeList
from relay_queue.admin.lists.criteria import Criteria
from relay_queue.admin.lists.names import Names
from relay_queue.admin.lists.walk import Walk
from relay_queue.validation import is_storable

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

MOST_LISTED: Final = 10_000
"""Rows that a list without a walk reaches at the most; filters and the search lead to the others."""


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts no further than ``MOST_LISTED``: counting a million rows takes longer than a page."""

    @cached_property
    def count(self) -> int:
        """The number of rows that the pages reach."""
        rows: QuerySet[Model] = self.object_list  # type: ignore[assignment]
        return rows.order_by()[:MOST_LISTED].count()


class ReadingAdmin(ModelAdmin):
    """A page whose rows may be looked at by whoever has the view permission, and changed by nobody.

    The tables are written by the store alone, so nothing is added, changed or deleted here.
    """

    paginator = BoundedPaginator
    show_full_result_count = False
    # Counts beside the filters would read the whole table once for each choice.
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    # A click on a heading would sort the whole table by a column without an index.
    sortable_by = ()

    class Media:
        """The look of lists and pages; neither script nor style stands in the pages."""

        css: ClassVar[dict[str, list[str]]] = {
            "all": ["relay_queue/tokens.css", "relay_queue/lists.css"]
        }

    object_history_template = "admin/relay_queue/history.html"

    linked: ClassVar[frozenset[str]] = frozenset()
    """Conditions that no filter of the list has, and that links of other pages to it have."""

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Name what is listed: the admin's own title asks to select a row, which nobody must."""
        if not _can_be_asked(request.GET):
            text = _("No row has a NUL character in it, so no filter can ask for one.")
            messages.warning(request, text, fail_silently=True)
            return redirect(request.path)
        title = capfirst(str(self.opts.verbose_name_plural))
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:
        """Allow the filters of the list and what other pages link with.

        Django allows every column. One could then ask a list, letter by letter, for what its pages
        do not show: a payload, or the token of a lease.
        """
        return lookup in self.linked or any(
            lookup in _parameters(each) for each in self.get_list_filter(request)
        )

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any | None:
        """Return the row with a key; None, too, for keys at which a database would fail."""
        if not is_storable(object_id):
            return None
        return super().get_object(request, object_id, from_field)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Read from the database of the queue."""
        return super().get_queryset(request).using(conf.get().database)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody may add a row."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody may change a row."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody may delete a row."""
        return False


def _can_be_asked(query: QueryDict) -> bool:
    """Say whether the database can look for all values of an address; the search takes any text."""
    return all(
        is_storable(text)
        for name, values in query.lists()
        if name != SEARCH_VAR
        for text in (name, *values)
    )


def _parameters(listed: Any) -> Sequence[str]:
    """Return the parameters of a filter: a choice has one, a span has four."""
    if isinstance(listed, str):  # a column, in a list of the project's own
        return [listed, f"{listed}__exact", f"{listed}__isnull"]
    if isinstance(listed, tuple):
        return [f"{listed[0]}__range__{end}_{part}" for end in ("gte", "lte") for part in (0, 1)]
    return [listed.parameter_name]


class DetailAdmin(ReadingAdmin):
    """A page that shows all of one row itself, instead of a list of its fields."""

    fields = ()

    class Media:
        """The look of the page of one row, which has charts like the dashboard."""

        css: ClassVar[dict[str, list[str]]] = {
            "all": [
                "relay_queue/dashboard.css",
                "relay_queue/job.css",
                "relay_queue/detail.css",
            ]
        }

    def detail(self, request: HttpRequest, shown: Any) -> Mapping[str, object]:
        """Return the title of the page and what its template shows of the row."""
        raise NotImplementedError  # each page says: Django's metaclass leaves no room for ABC

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """Show the row."""
        shown = options.get("obj")
        if shown is not None:
            context |= {"subtitle": None, **self.detail(request, shown)}
        return super().render_change_form(request, context, *args, **options)


class WalkingAdmin(ReadingAdmin):
    """A page whose list is a walk along an index, as quick at a million rows as at ten."""

    ordering = ("-id",)
    search_help_text = searching.HELP

    search_kinds: Sequence[str] = searching.PREFIXES
    """The prefixes that the search of this list knows."""

    counted = False
    """Whether the counters of jobs know how long the list is."""

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Use the list that walks."""
        return WalkChangeList

    def whole(self) -> QuerySet[Any]:
        """Return the rows of this list where no project limits them."""
        return sight.whole(self.model)

    def parse_search(self, request: HttpRequest, text: str) -> searching.Term | None:
        """Read what was typed into the search, as far as this person may search."""
        secrets = sight.may_view_payload(request, self.admin_site)
        return searching.parse(text, self.search_kinds, secrets=secrets)

    def criteria(self) -> Criteria:
        """Return what this list asks for before any filter."""
        return Criteria()

    def walk(self, asked: Criteria, names: Names) -> Walk:
        """Choose the index to walk for what was asked."""
        raise NotImplementedError  # each list says: Django's metaclass leaves no room for ABC

    def rows(self, request: HttpRequest, ids: Sequence[int]) -> Mapping[int, Any]:
        """Return the rows of one page by id, with all that the list shows of them."""
        raise NotImplementedError  # as above
