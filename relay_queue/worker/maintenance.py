"""Periodic housekeeping: delete what the retention settings no longer keep."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from django.db import Error

from relay_queue import conf, store
from relay_queue.states import State
from relay_queue.worker.tick import SLICE_SECONDS

logger = logging.getLogger("relay_queue.worker")

INTERVAL_SECONDS = 60.0
BITE_ROWS = 1000
"""Rows deleted in one transaction: the writer is free for others in between."""

BREATH_SECONDS = 0.2
"""Pause between two bites."""

VANISHED_AFTER = timedelta(hours=1)
"""Silence after which a worker whose death nobody can prove is written off."""


class Maintenance:
    """Prunes a bite at a time between ticks. Workers start apart, so that one prunes for all."""

    def __init__(self) -> None:
        # Random, not soon: workers that start together must not all prune together.
        self.next_at = time.monotonic() + random.uniform(0.5, 1.5) * INTERVAL_SECONDS
        self._chores: Iterator[Callable[[store.Transaction], int]] = iter(())
        self._chore: Callable[[store.Transaction], int] | None = None

    def due(self) -> bool:
        """Whether the next bite may be taken."""
        return time.monotonic() >= self.next_at

    def step(self) -> None:
        """Take one bite; a database that is busy or full is left alone until the next time."""
        if self._chore is None:
            self._chore = next(self._chores, None)
        if self._chore is None:
            self._chores = _chores()
            self._chore = next(self._chores)
        try:
            # Never longer than a slice: this is the loop's thread, and it has time limits to keep.
            with store.transaction(wait_seconds=SLICE_SECONDS, first=True) as tx:
                deleted = self._chore(tx)
        except Error as error:
            # The next look finds out whether the connection is lost.
            logger.info("Pruning is put off: %s", error)
            self._rest()
            return
        if deleted >= BITE_ROWS:
            self.next_at = time.monotonic() + BREATH_SECONDS
            return
        self._chore = next(self._chores, None)
        self.next_at = time.monotonic() + BREATH_SECONDS
        if self._chore is None:
            self._rest()

    def _rest(self) -> None:
        self._chore, self._chores = None, iter(())
        self.next_at = time.monotonic() + random.uniform(0.75, 1.25) * INTERVAL_SECONDS


def _chores() -> Iterator[Callable[[store.Transaction], int]]:
    """Yield what must be pruned, each as a function that takes one bite."""
    settings = conf.get()
    kept = {
        State.SUCCEEDED: settings.retain_succeeded_seconds,
        State.CANCELLED: settings.retain_cancelled_seconds,
        State.DEAD: settings.retain_dead_seconds,
    }
    for state, seconds in kept.items():
        if seconds is not None:
            yield _prune_jobs(state, timedelta(seconds=seconds))
    if settings.retain_minutes_seconds is not None:
        minutes = timedelta(seconds=settings.retain_minutes_seconds)
        yield lambda tx: store.prune_minutes(tx, tx.now - minutes, BITE_ROWS)
    if settings.retain_bulk_acts_seconds is not None:
        bulk_acts = timedelta(seconds=settings.retain_bulk_acts_seconds)
        yield lambda tx: store.prune_bulk_acts(tx, tx.now - bulk_acts, BITE_ROWS)
    yield lambda tx: store.write_off_workers(tx, tx.now - VANISHED_AFTER, BITE_ROWS)
    if settings.retain_workers_seconds is not None:
        workers = timedelta(seconds=settings.retain_workers_seconds)
        yield lambda tx: store.prune_workers(tx, tx.now - workers, BITE_ROWS)


def _prune_jobs(state: State, kept: timedelta) -> Callable[[store.Transaction], int]:
    return lambda tx: store.prune(tx, state, tx.now - kept, BITE_ROWS)
