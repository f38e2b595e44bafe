"""One thing that a row has looked at: what was found, beside what was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Value = str | int | float | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Observation:
    """``found`` and ``promised`` are in words; ``held`` says whether the one fits the other."""

    what: str
    found: str
    promised: str
    held: bool

    def __str__(self) -> str:
        """Say what was found, and what should have been if that is something else."""
        missed = "" if self.held else f" (promised: {self.promised})"
        return f"{self.what}: {self.found}{missed}"

    def as_data(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def equal(what: str, found: Value | None, promised: Value) -> Observation:
    """Observe something that must be just this."""
    return Observation(what, _words(found), _words(promised), found == promised)


def at_most(what: str, found: float, most: float) -> Observation:
    """Observe a number that must not be larger."""
    return Observation(what, _words(found), f"at most {_words(most)}", found <= most)


def at_least(what: str, found: float, least: float) -> Observation:
    """Observe a number that must not be smaller."""
    return Observation(what, _words(found), f"at least {_words(least)}", found >= least)


def contains(what: str, found: str, part: str) -> Observation:
    """Observe a text that must have a part; only its first line is kept."""
    shown = found.strip().partition("\n")[0] or "nothing"
    return Observation(what, shown, f"… {part} …", part in found)


def untried(what: str, why: str) -> Observation:
    """Say that something cannot be tried on this system, so that its absence is seen."""
    return Observation(what, f"not tried, {why}", "", True)


def _words(value: Value | None) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return value or "nothing"
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) or "none"
