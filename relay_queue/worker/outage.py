"""What is said while a process waits for a database that is away: once, then ever more rarely."""

from __future__ import annotations

import logging
import time

from relay_queue.store.dialects.base import Trouble

FIRST_PAUSE_SECONDS = 10.0
MAX_PAUSE_SECONDS = 600.0
BUSY_SECONDS = 5.0
"""How long another may hold the writer before it is worth a line."""


class Outage:
    """One wait for the database, from its first error to its end."""

    def __init__(self, logger: logging.Logger) -> None:
        """Prepare to say it to ``logger``."""
        self._logger = logger
        self._since: float | None = None
        self._say_at = 0.0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._said = False

    def goes_on(self, error: object, trouble: Trouble = "lost") -> None:
        """Note that the database is still away, for this reason."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._say_at = now + (BUSY_SECONDS if trouble == "busy" else 0.0)
        if now < self._say_at:
            return
        self._logger.warning(
            "The database %s; waiting for it%s: %s",
            "is not reached" if trouble == "lost" else "takes no writes",
            f", {now - self._since:.0f} s so far" if now > self._since else "",
            " ".join(str(error).split()),
        )
        self._said = True
        self._say_at = now + self._pause_seconds
        self._pause_seconds = min(MAX_PAUSE_SECONDS, 2 * self._pause_seconds)

    def is_over(self) -> None:
        """Note that the database answers; said only if its absence was."""
        if self._said and self._since is not None:
            waited = time.monotonic() - self._since
            self._logger.warning("The database is reached after %.0f s.", waited)
        self._since, self._said, self._pause_seconds = None, False, FIRST_PAUSE_SECONDS
