"""The base of all pages: they only read, and they are quick on large tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Model, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.admin import sight
from relay_queue.admin.lists import searching
from relay_queue.admin.lists.changelist import ClockedChangeList, ScanChangeList
from relay_queue.query.list_plans import Criteria
from relay_queue.query.lists import IndexScan, Names
from relay_queue.validation import is_storable

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

MOST_LISTED: Final = 10_000
"""Rows that a list without an index scan reaches; filters and the search find the others."""


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts no further than ``MOST_LISTED``: counting a million rows takes longer than a page."""

    @cached_property
    def count(self) -> int:
        """The number of rows that the pages reach."""
        rows: QuerySet[Model] = self.object_list  # type: ignore[assignment]
        return rows.order_by()[:MOST_LISTED].count()


class ReadingAdmin(ModelAdmin):
    """A page that shows rows to those with the view permission, and changes none.

    The store alone writes the tables, so no form adds, changes or deletes a row.
    """

    paginator = BoundedPaginator
    show_full_result_count = False
    # Counts beside the filters would read the whole table once for each choice.
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    # A click on a heading would sort the whole table by a column without an index.
    sortable_by = ()

    class Media:
        """The style sheets of lists and pages, which themselves have no script and no style."""

        css: ClassVar[dict[str, list[str]]] = {
            "all": ["relay_queue/tokens.css", "relay_queue/lists.css"]
        }

    object_history_template = "admin/relay_queue/history.html"

    linked: ClassVar[frozenset[str]] = frozenset()
    """Conditions that links of other pages have, and that are no filter of the list."""

    def url_name(self, page: str) -> str:
        """Return the name of an address of this model, as Django's admin names its own."""
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"

    def address_of(self, page: str, *args: Any) -> str:
        """Return the address of a page of this model at this site."""
        return reverse(f"{self.admin_site.name}:{self.url_name(page)}", args=args)

    def link_to(self, model: type[Model], key: Any, text: object) -> SafeString:
        """Return a text as a link to a row of another table, if this site has a page for it."""
        if not self.admin_site.is_registered(model):
            return format_html("{}", text)
        name = f"{self.admin_site.name}:{model._meta.app_label}_{model._meta.model_name}_change"
        return format_html('<a href="{}">{}</a>', reverse(name, args=[quote(key)]), text)

    def find_row(self, request: HttpRequest, object_id: Any) -> Any:
        """Return the row with a key. Raises `Http404`, or `PermissionDenied` if it is hidden."""
        row = self.get_object(request, str(object_id))
        if row is None:
            raise Http404
        if not self.has_view_permission(request, row):
            raise PermissionDenied
        return row

    def respond(self, request: HttpRequest, template: str, **context: Any) -> TemplateResponse:
        """Return a page of the site from one of Relay's templates."""
        own = {"opts": self.opts, "media": self.media}
        context = {**self.admin_site.each_context(request), **own, **context}
        return TemplateResponse(request, f"admin/relay_queue/{template}", context)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Use a list whose rows have the time of the request."""
        return ClockedChangeList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list under the name of its rows, in place of Django's "Select a row"."""
        if not _can_be_asked(request.GET):
            text = _("No row has a NUL character in it, so no filter can ask for one.")
            messages.warning(request, text, fail_silently=True)
            return redirect(request.path)
        title = capfirst(str(self.opts.verbose_name_plural))
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:
        """Allow the filters of the list and the conditions of links of other pages.

        Django allows every column. A list could then be asked, letter by letter, for values that no
        page shows: a payload, or the token of a lease.
        """
        return lookup in self.linked or any(
            lookup in _parameters(each) for each in self.get_list_filter(request)
        )

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any | None:
        """Return the row with a key; None also for keys at which a database would fail."""
        if not is_storable(object_id):
            return None
        return super().get_object(request, object_id, from_field)

    def detail(self, request: HttpRequest, shown: Any) -> Mapping[str, object]:
        """Return what the page of one row shows by a template of its own, and its title."""
        return {}

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """Show the page with the details of the row."""
        shown = options.get("obj")
        detail = {} if shown is None else self.detail(request, shown)
        if detail:
            context |= {"subtitle": None, **detail}
        return super().render_change_form(request, context, *args, **options)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Read from the database of the queue."""
        return super().get_queryset(request).using(conf.get().database)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: the store alone adds rows."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: the store alone changes rows."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: the store alone deletes rows."""
        return False


def _can_be_asked(query: QueryDict) -> bool:
    """Say whether a database can compare all values of an address; the search takes any text."""
    return all(
        is_storable(text)
        for name, values in query.lists()
        if name != SEARCH_VAR
        for text in (name, *values)
    )


def _parameters(listed: Any) -> Sequence[str]:
    """Return the parameters of a filter: a choice has one, a range of times has four."""
    if isinstance(listed, str):  # a column, in a subclass of the project
        return [listed, f"{listed}__exact", f"{listed}__isnull"]
    if isinstance(listed, tuple):
        return [f"{listed[0]}__range__{end}_{part}" for end in ("gte", "lte") for part in (0, 1)]
    return [listed.parameter_name]


class DetailAdmin(ReadingAdmin):
    """A page that shows one row by a template of its own, instead of a list of its fields."""

    fields = ()

    class Media:
        """The style sheets of the page of one row, which has charts like the dashboard."""

        css: ClassVar[dict[str, list[str]]] = {
            "all": [
                "relay_queue/dashboard.css",
                "relay_queue/job.css",
                "relay_queue/detail.css",
            ]
        }

    counter_columns: ClassVar[frozenset[str]] = frozenset()
    """Columns with numbers from counters, which count jobs that a viewer may not see, too."""

    def get_list_display(self, request: HttpRequest) -> Any:
        """Leave out the numbers that count jobs which this person may not see."""
        shown = super().get_list_display(request)
        if sight.counters_tell(request, self.admin_site, self.model):
            return shown
        return [column for column in shown if column not in self.counter_columns]


class ScanningAdmin(ReadingAdmin):
    """A page whose list is an index scan, as quick at a million rows as at ten."""

    ordering = ("-id",)
    search_help_text = searching.HELP

    search_kinds: Sequence[str] = searching.PREFIXES
    """The prefixes that the search of this list knows."""

    counted = False
    """Whether the counters of jobs know how long the list is."""

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Use the list on top of an index scan."""
        return ScanChangeList

    def whole(self) -> QuerySet[Any]:
        """Return the rows of this list where no project limits them."""
        return sight.whole(self.model)

    def parse_search(self, request: HttpRequest, text: str) -> searching.Term | None:
        """Parse the text of the search; a kind that this person may not search by is a fault."""
        secrets = sight.may_view_payload(request, self.admin_site)
        return searching.parse(text, self.search_kinds, secrets=secrets)

    def search_condition(self, term: searching.Term) -> Q:
        """Return the condition of a search that is not at fault."""
        return term.condition

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Keep the rows that the search finds; a search at fault finds none."""
        term = self.parse_search(request, search_term)
        if term is None:
            return queryset, False
        if term.fault:
            return queryset.none(), False
        return queryset.filter(self.search_condition(term)), False

    def criteria(self) -> Criteria:
        """Return the criteria of this list without any filter."""
        return Criteria()

    def plan(self, asked: Criteria, names: Names) -> IndexScan:
        """Choose the index to scan for the criteria."""
        raise NotImplementedError  # not an ABC: its metaclass conflicts with Django's

    def rows(self, request: HttpRequest, ids: Sequence[int]) -> Mapping[int, Any]:
        """Return the rows of one page by id, with everything that the list shows of them."""
        raise NotImplementedError  # as above
