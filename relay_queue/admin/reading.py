"""What all pages have in common: they only read, and they are quick on large tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from relay_queue import conf
from relay_queue.models import Queue

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

MOST_LISTED: Final = 10_000
"""Rows that a list reaches at the most; filters and the search lead to the others."""

MOST_ID_DIGITS: Final = 18


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
        """The look that all pages share."""

        css = {"all": ["relay_queue/tokens.css"]}

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


class QueueFilter(admin.SimpleListFilter):
    """Filters by queue. The names come from the table of queues, which is short."""

    title = _("queue")
    parameter_name = "queue"
    field = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the names of all queues."""
        names = Queue.objects.using(conf.get().database).values_list("name", flat=True)
        return [(name, name) for name in names]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Keep the rows of the chosen queue."""
        return queryset.filter(**{self.field: self.value()}) if self.value() else queryset


class PresenceFilter(admin.SimpleListFilter):
    """Filters by whether ``field`` has a value. Subclasses name the field and the two choices."""

    field = ""
    present: Any = _("Yes")
    absent: Any = _("No")

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return the two choices."""
        return [("yes", self.present), ("no", self.absent)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Keep the rows with, or those without, a value."""
        if self.value() not in {"yes", "no"}:
            return queryset
        return queryset.filter(**{f"{self.field}__isnull": self.value() == "no"})


def as_id(term: str) -> int | None:
    """Return the id that a search term spells, or None if it is no id."""
    term = term.strip()
    is_id = term.isascii() and term.isdigit() and len(term) <= MOST_ID_DIGITS
    return int(term) if is_id else None
