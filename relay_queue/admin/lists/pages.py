"""Numbered pages of an index scan; each link has the place from which its number counts.

A link has the number of a page and the place where that page begins. So a jump skips at most
`REACH` rows from any page, and new rows do not move the others from page to page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from django.utils.dateparse import parse_datetime

from relay_queue.query.lists import Counted, Place, ScanReader
from relay_queue.validation import MAX_ID

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


def as_parameters(link: Link) -> dict[str, Any]:
    """Return the parameters of a link's address."""
    return {"p": link.page, "at": None if link.anchor is None else str(link.anchor)}
