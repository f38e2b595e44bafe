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
        return None if self.total.more else max(1, -(-self.total.n // self.size))

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

    @property
    def last(self) -> int | None:
        """The number of the last page, if it is known."""
        return None if self.total.more else max(1, -(-self.total.n // self.size))

    def read(self, number: int, anchor: Anchor = START) -> Page:
        """Read the page of a number, counted from the anchor, the start or the end of the list."""
        number = max(1, number)
        if self.last is not None and number > self.last and anchor is START:
            number = self.last
        if number < anchor.page:
            if (number - 1) * self.size > REACH >= (anchor.page - number) * self.size:
                return self._backward(number, anchor)
            if self.total.more and (anchor.page - number) * self.size <= REACH:
                return self._backward(number, anchor)
            anchor = START
        skip = (number - anchor.page) * self.size
        if skip > REACH and self.last is not None:
            return self._from_the_end(number, self.last)
        if skip > REACH:
            return self._forward(anchor.page + REACH // self.size, anchor, too_far=True)
        return self._forward(number, anchor)

    def _forward(self, number: int, anchor: Anchor, *, too_far: bool = False) -> Page:
        skip = (number - anchor.page) * self.size
        found = self.reader.read(anchor.place, limit=self.size + 1, skip=skip)
        has_next = len(found) > self.size
        unseen = None if has_next else self.reader.unseen(anchor.place)
        beyond = None if unseen is None else Anchor(number + bool(found), unseen)
        return self._page(number, found[: self.size], has_next, beyond=beyond, too_far=too_far)

    def _backward(self, number: int, anchor: Anchor) -> Page:
        skip = (anchor.page - number - 1) * self.size
        places = self.reader.read(
            anchor.place, limit=self.size, skip=skip, forward=False, inclusive=False
        )
        return self._page(number, places, has_next=True)

    def _from_the_end(self, number: int, last: int) -> Page:
        """Count back from the end; if that is too far, too, read the nearest page in reach."""
        nearest = last - REACH // self.size
        too_far, number = number < nearest, max(number, nearest)
        on_last = self.total.n - (last - 1) * self.size
        limit, skip = on_last, 0
        if number < last:
            limit, skip = self.size, on_last + (last - 1 - number) * self.size
        places = self.reader.read(None, limit=limit, skip=skip, forward=False)
        return self._page(number, places, number < last, too_far=too_far)

    def _page(self, number: int, places: list[Place], has_next: bool, **more: Any) -> Page:
        return Page(number, self.size, places, self.total, has_next, **more)


def as_parameters(link: Link) -> dict[str, Any]:
    """Return the parameters of a link's address."""
    return {"p": link.page, "at": None if link.anchor is None else str(link.anchor)}
