"""One run of one family of figures: what is wanted, how large, and where it may write."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Run:
    """What a family is told. ``say`` shows one line of progress."""

    names: Collection[str]
    quick: bool
    folder: Path
    say: Callable[[str], None]

    def wants(self, *names: str) -> bool:
        """Say whether any of these figures is asked for."""
        return any(name in self.names for name in names)

    def size(self, full: Number, quick: Number) -> Number:
        """Return the size for this run."""
        return quick if self.quick else full
