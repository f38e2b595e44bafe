"""The admin's list on top of an index scan: the same few statements for any number of rows.

A link to a page has its number and the place where that page begins. So a jump skips at most
`REACH` rows from any page, and new rows do not move the others from page to page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from django.contrib import messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import DataError
from django.db.models import QuerySet, Sum
from django.http import HttpRequest
from django.utils.dateparse import parse_datetime
from django.utils.functional import cached_property
from django.utils.timezone import is_aware
from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.admin import sight
from relay_queue.models import QueueCount
from relay_queue.query.list_plans import Criteria
from relay_queue.query.lists import Counted, IndexScan, Place, ScanReader
from relay_queue.validation import MAX_ID

ANCHOR_VAR: Final = "at"
PACKAGE: Final = "relay_queue."


REACH: Final = 10_000
"""Rows that one jump may skip."""
JUMPS: Final = (-100, -10, -2, -1, 0, 1, 2, 10, 100)
SEPARATOR: Final = "~"

_ANCHOR: Final = re.compile(
    r"(?P<page>[1-9][0-9]{0,8})~"
    r"(?:(?P<number>-?[0-9]{1,19})|(?P<time>[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]{8,15}(?:\+00:00)?))"
    r"~(?P<id>[0-9]{1,18})"
)


class Anchor(NamedTuple):
    """Where a page begins."""

    page: int
    place: Place | None

    def __str__(self) -> str:
        assert self.place is not None
        return SEPARATOR.join([str(self.page), str(self.place.key), str(self.place.id)])


START: Final = Anchor(1, None)


def parse_anchor(text: str, *, numeric: bool) -> Anchor:
    """Return the anchor of a link, or the start of the list if the text fits no key of it."""
    found = _ANCHOR.fullmatch(text)
    if found is None or numeric == (found["time"] is not None):
        return START
    key: Any = int(found["number"]) if numeric else found["time"]
    if not (abs(key) <= MAX_ID if numeric else _is_time(key)):
        return START
    return Anchor(int(found["page"]), Place(key, int(found["id"])))


def _is_time(text: str) -> bool:
    try:
        return parse_datetime(text) is not None
    except ValueError:  # the form of a time, with a month 13
        return False


class Link(NamedTuple):
    """A page that can be opened: its number, and the anchor from which the number counts."""

    page: int
    anchor: Anchor | None


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list and the links from it.

    ``beyond`` is where the next page begins when this one is short because `SCAN` rows were
    checked. ``too_far`` says that no single jump reaches the page of the request.
    """

    number: int
    size: int
    places: list[Place]
    total: Counted
    has_next: bool
    beyond: Anchor | None = None
    too_far: bool = False

    @property
    def last(self) -> int | None:
        """The number of the last page, if it is known."""
        return last_page(self.total, self.size)

    @property
    def anchor(self) -> Anchor | None:
        """The link to this page's first row."""
        return Anchor(self.number, self.places[0]) if self.places else None

    @property
    def previous(self) -> Link | None:
        """The page before."""
        return Link(self.number - 1, self.anchor) if self.number > 1 else None

    @property
    def next(self) -> Link | None:
        """The page after."""
        return Link(self.number + 1, self.anchor) if self.has_next else None

    def jumps(self) -> Iterator[Link]:
        """Yield the numbered pages around this one, then those further away, by number."""
        for step in JUMPS:
            page = self.number + step
            if step == 0 or (1 < page < self.number) or self._is_ahead(page):
                yield Link(page, self.anchor)

    def _is_ahead(self, page: int) -> bool:
        if page <= self.number:
            return False
        known = self.number + self.has_next if self.last is None else self.last - 1
        return page <= known


@dataclass(frozen=True, slots=True)
class PageReader:
    """Reads the pages of one list, which has ``total`` rows, ``size`` to a page."""

    reader: ScanReader
    total: Counted
    size: int

    def read(self, number: int, anchor: Anchor = START) -> Page:
        """Read the page of a number, counted from the anchor, the start or the end of the list."""
        number, last = max(1, number), last_page(self.total, self.size)
        if last is not None and anchor is START:
            number = min(number, last)
        if number < anchor.page:
            before = (anchor.page - number - 1) * self.size
            is_far_from_start = self.total.more or (number - 1) * self.size > REACH
            if is_far_from_start and before + self.size <= REACH:
                return self._backward(number, anchor.place, before, self.size)
            anchor = START
        reach = anchor.page + REACH // self.size
        if number <= reach:
            return self._forward(number, anchor)
        if last is None:
            return self._forward(reach, anchor, too_far=True)
        return self._from_the_end(number, last)

    def _forward(self, number: int, anchor: Anchor, *, too_far: bool = False) -> Page:
        skip = (number - anchor.page) * self.size
        found = self.reader.read(anchor.place, limit=self.size + 1, skip=skip)
        has_next = len(found) > self.size
        unseen = None if has_next else self.reader.unseen(anchor.place)
        beyond = None if unseen is None else Anchor(number + bool(found), unseen)
        return Page(number, self.size, found[: self.size], self.total, has_next, beyond, too_far)

    def _from_the_end(self, number: int, last: int) -> Page:
        """Count back from the end; if that is too far, too, read the nearest page in reach."""
        nearest = last - REACH // self.size
        too_far, number = number < nearest, min(max(number, nearest), last)
        behind = max(0, self.total.n - number * self.size)
        rows = min(self.size, self.total.n - (number - 1) * self.size)
        return self._backward(number, None, behind, rows, has_next=number < last, too_far=too_far)

    def _backward(
        self,
        number: int,
        place: Place | None,
        skip: int,
        rows: int,
        *,
        has_next: bool = True,
        too_far: bool = False,
    ) -> Page:
        places = self.reader.read(place, limit=rows, skip=skip, forward=False, inclusive=False)
        return Page(number, self.size, places, self.total, has_next, None, too_far)


def last_page(total: Counted, size: int) -> int | None:
    """Return the number of the last page, if it is known."""
    return None if total.more else max(1, -(-total.n // size))


class Shown(NamedTuple):
    """A link to a page as the template shows it; the present page has no address."""

    number: int
    address: str | None


class ClockedChangeList(ChangeList):
    """A list whose rows have the time as ``now``, since columns do not know the request."""

    def get_results(self, request: HttpRequest) -> None:
        """Read one page, and set the time on each row."""
        super().get_results(request)
        self.set_time(request)

    def set_time(self, request: HttpRequest) -> None:
        """Set the time of the request on each row of the page."""
        now = sight.now(request)
        for row in self.result_list:
            row.now = now


class ScanChangeList(ClockedChangeList):
    """A list whose pages come from an index scan that the admin of the model chooses."""

    page: Page

    fault: Any = ""
    """What is wrong with the search; a search at fault finds nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Read the page that the request asks for."""
        try:
            super().__init__(*args, **options)
        except (OverflowError, DataError) as error:  # a value in the address that fits no column
            raise IncorrectLookupParameters(error) from error

    @property
    def listing(self) -> Any:
        """The page of the model, a `relay_queue.admin.reading.ScanningAdmin`."""
        return self.model_admin

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        """Return the rows that the filters and the search keep; the anchor is no filter."""
        self.anchor_text = self.params.pop(ANCHOR_VAR, "") or request.GET.get(ANCHOR_VAR, "")
        self.filter_params.pop(ANCHOR_VAR, None)
        return super().get_queryset(request, *args, **kwargs)

    def get_filters(self, request: HttpRequest) -> Any:
        """Keep the conditions that no filter of the list has: links of other pages have such."""
        found = super().get_filters(request)
        self.remaining: dict[str, Any] = found[2]
        return found

    def get_results(self, request: HttpRequest) -> None:
        """Read one page: the ids along the index, then the rows."""
        asked = self.criteria(request)
        scan: IndexScan = self.listing.plan(asked, sight.all_names(request))
        reader = self._reader(scan, asked)
        total = self._counted(asked) or reader.count()
        anchor = parse_anchor(self.anchor_text, numeric=scan.numeric)
        pages = PageReader(reader, total, self.list_per_page)
        self.page = pages.read(self.page_num, anchor)
        ids = [place.id for place in self.page.places]
        rows = self.listing.rows(request, ids)
        self.result_list = [rows[pk] for pk in ids if pk in rows]
        self.set_time(request)
        self._set_for_the_admin()
        if self.page.too_far:
            text = _("That page is too far for one jump. Use a filter.")
            messages.info(request, text, fail_silently=True)

    def criteria(self, request: HttpRequest) -> Criteria:
        """Return the criteria of the filters, the address and the search."""
        asked: Criteria = self.listing.criteria()
        for spec in self.filter_specs:
            if hasattr(spec, "add_to"):
                spec.add_to(asked)
            else:  # a filter of the project's own, which no plan knows
                asked.others.add("filter")
        for lookup, values in self.remaining.items():
            _add_lookup(asked, lookup, values)
        term = self.listing.parse_search(request, self.query)
        if term is not None and term.fault:
            self.fault = term.fault
            messages.warning(request, term.fault, fail_silently=True)
            asked.ids = []
        elif term is not None:
            term.add_to(asked)
        return asked

    def _reader(self, scan: IndexScan, asked: Criteria) -> ScanReader:
        is_decided = asked.asked <= scan.covers and not self.is_limited
        return ScanReader(scan, None if is_decided else self.queryset)

    @cached_property
    def is_limited(self) -> bool:
        """Whether a project hides rows from this person, which neither index nor counters know."""
        asks = ((self, "get_queryset"), (self.model_admin, "get_search_results"))
        return any(not _is_ours(owner, name) for owner, name in asks) or sight.is_limited(
            self.root_queryset, self.listing.whole()
        )

    def _counted(self, asked: Criteria) -> Counted | None:
        """Return the exact number from the counters; None if they do not know it."""
        if not self.listing.counted or self.is_limited or not asked.asked <= {"state", "queue"}:
            return None
        rows = QueueCount.objects.using(conf.get().database)
        if asked.state:
            rows = rows.filter(state=asked.state)
        if asked.queue:
            rows = rows.filter(queue=asked.queue)
        return Counted(max(0, rows.aggregate(n=Sum("n"))["n"] or 0), more=False)

    def _set_for_the_admin(self) -> None:
        """Set the attributes that the admin's own templates read; page numbers are Relay's own."""
        self.result_count = self.page.total.n
        self.full_result_count = self.result_count
        self.show_full_result_count = False
        self.show_admin_actions = True
        self.can_show_all = self.multi_page = False
        self.page_num = self.page.number
        self.paginator = Paginator(self.result_list, self.list_per_page)

    def address(self, link: Link) -> str:
        """Return the address of a page."""
        at = None if link.anchor is None else str(link.anchor)
        return self.get_query_string({"p": link.page, ANCHOR_VAR: at})

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


def _add_lookup(asked: Criteria, lookup: str, values: Any) -> None:
    """Add a condition of an address. One that no plan knows is checked row by row."""
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
