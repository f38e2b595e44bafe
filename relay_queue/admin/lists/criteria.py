"""What a visitor asked of a list, apart from how it is found."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime


@dataclass(slots=True)
class Span:
    """A range of times, both ends included; None is open."""

    since: datetime | None = None
    until: datetime | None = None

    def __bool__(self) -> bool:
        """Whether it excludes anything."""
        return self.since is not None or self.until is not None


@dataclass(slots=True)
class Criteria:
    """The filters and the search of one request. An empty value asks for nothing.

    ``others`` names what no walk knows how to use; rows are then looked at one by one.
    """

    state: str = ""
    queue: str = ""
    task: str = ""
    task_prefix: str = ""
    key: str = ""
    error: str = ""
    verdict: str = ""
    outcomes: list[str] = field(default_factory=list)
    presence: dict[str, bool] = field(default_factory=dict)
    ids: list[int] | None = None
    created: Span = field(default_factory=Span)
    due: Span = field(default_factory=Span)
    finished: Span = field(default_factory=Span)
    others: set[str] = field(default_factory=set)

    @property
    def asked(self) -> frozenset[str]:
        """The names of what was asked for."""
        return frozenset(
            item.name
            for item in fields(self)
            if getattr(self, item.name) or (item.name == "ids" and self.ids is not None)
        )
