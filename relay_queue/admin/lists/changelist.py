"""The admin's list on top of an index scan: the same few statements for any number of rows."""

from __future__ import annotations

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
from django.utils.text import capfirst
from django.utils.timezone import is_aware
from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.admin import sight
from relay_queue.admin.lists.pages import (
    JUMPS,
    Link,
    Page,
    PageReader,
    as_parameters,
    parse_anchor,
)
from relay_queue.models import QueueCount
from relay_queue.query.list_plans import Criteria
from relay_queue.query.lists import Counted, IndexScan, ScanReader

ANCHOR_VAR: Final = "at"
PACKAGE: Final = "relay_queue."


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
        # In place of Django's "Select job to view".
        self.title = capfirst(str(self.opts.verbose_name_plural))

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
