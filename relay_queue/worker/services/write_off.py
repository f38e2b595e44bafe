"""Write off the workers that have been silent for long and whose death cannot be proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from relay_queue import conf, store

VANISHED_AFTER = timedelta(hours=1)
"""Silence after which a worker whose death cannot be proven is written off."""


class WriteOff:
    """Marks such workers as stopped."""

    def bites(
        self, _settings: conf.RelaySettings
    ) -> Iterator[Callable[[store.Transaction, int], int]]:
        """Yield the one bite."""
        yield lambda tx, rows: store.write_off_workers(tx, tx.now - VANISHED_AFTER, rows)
