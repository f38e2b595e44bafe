"""Hindrance: what keeps a worker from its work though no job is at fault: a table, a right, a trigger."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

logger = logging.getLogger("relay_queue.worker")

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 10.0
REASON_CHARACTERS = 160

READ = "read the tables"
COMMIT = "commit"
"""What else than the steps of a tick can fail."""


class Hindrance:
    """The steps that fail, until they pass again.

    The first failure is tried once more at once: statements are prepared anew by then, and that is all
    that a changed column asks for. From the second on it has a ``reason``, and the pauses grow.
    """

    def __init__(self) -> None:
        self._faults: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._pause: float | None = None

    def __bool__(self) -> bool:
        """Whether anything fails."""
        return bool(self._faults)

    @property
    def reason(self) -> str:
        """What fails and why, in one line; empty if nothing does."""
        return "; ".join(f"cannot {step}: {why}" for step, why in self._said.items())

    def meet(self, faults: Mapping[str, Exception]) -> float:
        """Take in what could not be done; return the seconds until it is to be tried again."""
        first = self._pause is None
        self._pause = min(MAX_PAUSE_SECONDS, 2 * (self._pause or FIRST_PAUSE_SECONDS / 2))
        if first:
            self._pause = 0.0
        for step, error in faults.items():
            why = self._faults[step] = in_one_line(error)
            if not first and self._said.get(step) != why:
                self._said[step] = why
                logger.error("Cannot %s: %s. No job is given up for that; trying on.", step, why)
        return self._pause

    def passed(self, steps: Iterable[str]) -> None:
        """Take in what was done again."""
        for step in steps:
            self._faults.pop(step, None)
            if self._said.pop(step, None) is not None:
                logger.warning("Can %s again.", step)
        if not self._faults:
            self._pause = None


def in_one_line(error: Exception) -> str:
    """Return an error's class and the first line of what it says."""
    # A server adds details with the values of the row: they are nobody's business who reads of workers.
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:REASON_CHARACTERS]
