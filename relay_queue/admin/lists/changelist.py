"""The admin's list on top of a walk, with the same few statements however many rows there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

from django.contrib import messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import DataError
from django.db.models import QuerySet, Sum
from django.http import HttpRequest
from django.utils.dateparse import parse_datetime
from django.utils.functional import cached_property
from django.utils.text import capfirst
from django.utils.timezone import is_aware
from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.admin import sight
from relay_queue.admin.lists import names, searching
from relay_queue.admin.lists.criteria import Criteria
from relay_queue.admin.lists.pages import (
    JUMPS,
    Link,
    Page,
    Turner,
    as_parameters,
    parse_anchor,
)
from relay_queue.admin.lists.walk import Counted, Reader, Walk
from relay_queue.models import QueueCount

ANCHOR_VAR: Final = "at"
PACKAGE: Final = "relay_queue."


class Shown(NamedTuple):
    """A link to a page as the template shows it; without an address it is this page."""

    number: int
    address: str | None


class Telling(Protocol):
    """A filter that tells what it asks for."""

    def tell(self, asked: Criteria) -> None:
        """Add the choice to what is asked for."""


class Walker(Protocol):
    """What a list asks of the admin of its model."""

    counted: bool

    def whole(self) -> QuerySet[Any]:
        """Return the rows of the list where no project limits them."""

    def parse_search(self, request: HttpRequest, text: str) -> searching.Term | None:
        """Read what was typed into the search, as far as this person may search."""

    def criteria(self) -> Criteria:
        """Return what the list asks for before any filter."""

    def walk(self, asked: Criteria, known: names.Names) -> Walk:
        """Choose the index to walk for what was asked."""

    def rows(self, request: HttpRequest, ids: Sequence[int]) -> Mapping[int, Any]:
        """Return the rows of one page by id, with all that the list shows of them."""


class WalkChangeList(ChangeList):
    """A list whose page comes from a walk. The model's admin says which, and what it shows of it."""

    page: Page

    fault: Any = ""
    """What is wrong with the search; nothing is found then."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Read the page that the request asks for."""
        try:
            super().__init__(*args, **options)
        except (OverflowError, DataError) as error:  # a value in the address that no column holds
            raise IncorrectLookupParameters(error) from error
        # Not "Select job to view": the list is what people come for.
        self.title = capfirst(str(self.opts.verbose_name_plural))

    @property
    def walker(self) -> Walker:
        """The admin of the model."""
        return cast(Walker, self.model_admin)

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        """Return the rows that the filters and the search keep; the anchor is no filter."""
        self.anchor_text = self.params.pop(ANCHOR_VAR, "") or request.GET.get(ANCHOR_VAR, "")
        self.filter_params.pop(ANCHOR_VAR, None)
        return super().get_queryset(request, *args, **kwargs)

    def get_filters(self, request: HttpRequest) -> Any:
        """Keep the conditions that no filter beside the list has: other pages link with such."""
        found = super().get_filters(request)
        self.remaining: dict[str, Any] = found[2]
        return found

    def get_results(self, request: HttpRequest) -> None:
        """Read one page: the ids along the index, then the rows."""
        asked = self.criteria(request)
        known = names.of(request)
        walk = self.walker.walk(asked, known)
        reader = self._reader(walk, asked)
        total = self._counted(asked) or reader.count()
        anchor = parse_anchor(self.anchor_text, numeric=walk.numeric)
        turner = Turner(reader, total, self.list_per_page)
        self.page = turner.turn_to(self.page_num, anchor)
        ids = [place.id for place in self.page.places]
        rows = self.walker.rows(request, ids)
        self.result_list = [rows[pk] for pk in ids if pk in rows]
        self._tell_the_admin()
        if self.page.too_far:
            text = _("That page is too far for one jump. Use a filter.")
            messages.info(request, text, fail_silently=True)

    def criteria(self, request: HttpRequest) -> Criteria:
        """Return what the filters and the search ask for."""
        asked = self.walker.criteria()
        for spec in self.filter_specs:
            if hasattr(spec, "tell"):
                cast(Telling, spec).tell(asked)
            else:  # a filter of the project's own, which no walk knows
                asked.others.add("filter")
        for lookup, values in self.remaining.items():
            _tell_lookup(asked, lookup, values)
        term = self.walker.parse_search(request, self.query)
        if term is not None and term.fault:
            self.fault = term.fault
            messages.warning(request, term.fault, fail_silently=True)
            asked.ids = []
        elif term is not None:
            term.tell(asked)
        return asked

    def _reader(self, walk: Walk, asked: Criteria) -> Reader:
        alias = conf.get().database
        is_decided = asked.asked <= walk.covers and not self.is_limited
        return Reader(walk, alias, None if is_decided else self.queryset)

    @cached_property
    def is_limited(self) -> bool:
        """Whether a project keeps rows from this person, which neither walk nor counters know."""
        asks = ((self, "get_queryset"), (self.model_admin, "get_search_results"))
        return any(not _is_ours(owner, name) for owner, name in asks) or sight.is_limited(
            self.root_queryset, self.walker.whole()
        )

    def _counted(self, asked: Criteria) -> Counted | None:
        """Return the exact number from the counters, if they know it."""
        if not self.walker.counted or self.is_limited or not asked.asked <= {"state", "queue"}:
            return None
        rows = QueueCount.objects.using(conf.get().database)
        if asked.state:
            rows = rows.filter(state=asked.state)
        if asked.queue:
            rows = rows.filter(queue=asked.queue)
        return Counted(max(0, rows.aggregate(n=Sum("n"))["n"] or 0), more=False)

    def _tell_the_admin(self) -> None:
        """Set what the admin's own templates look at; the numbers of pages are ours."""
        self.result_count = self.page.total.n
        self.full_result_count = self.result_count
        self.show_full_result_count = False
        self.show_admin_actions = True
        self.can_show_all = self.multi_page = False
        self.page_num = self.page.number
        self.paginator = Paginator(self.result_list, self.list_per_page)

    def address(self, link: Link) -> str:
        """Return the address of a page."""
        return self.get_query_string(as_parameters(link))

    def pages(self) -> dict[str, Any]:
        """Return the links below the list."""
        page, first = self.page, Link(1, None)
        shown = [
            Shown(link.page, None if link.page == page.number else self.address(link))
            for link in page.jumps()
        ]
        last = page.last if page.last and page.last > page.number else None
        return {
            "first": Shown(1, self.address(first)) if page.number > 1 else None,
            "previous": page.previous and self.address(page.previous),
            "numbers": shown,
            "last": last and Shown(last, self.address(Link(last, page.anchor))),
            "next": page.next and self.address(page.next),
            "beyond": page.beyond and self.address(Link(page.beyond.page, page.beyond)),
            "total": page.total,
            "from": (page.number - 1) * page.size + 1,
            "to": (page.number - 1) * page.size + len(page.places),
            "far": max(JUMPS),
        }


def _tell_lookup(asked: Criteria, lookup: str, values: Any) -> None:
    """Add a condition of an address. One that no walk knows is looked up row by row."""
    value = values[-1]
    column, _, end = lookup.rpartition("__")
    asks = {"created_at": "created", "finished_at": "finished"}.get(column)
    moment = parse_datetime(value) if asks and isinstance(value, str) else None
    if asks and moment is not None and is_aware(moment) and end in {"gte", "lte"}:
        setattr(getattr(asked, asks), {"gte": "since", "lte": "until"}[end], moment)
    elif lookup == "outcome__in":
        asked.outcomes = [str(outcome) for outcome in value]
    else:
        asked.others.add(lookup)


def _is_ours(owner: object, name: str) -> bool:
    """Say whether a method is Relay's own, and not one of a project's subclass."""
    return str(getattr(type(owner), name).__module__).startswith(PACKAGE)
