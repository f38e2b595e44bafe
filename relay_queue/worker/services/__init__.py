"""What a worker does for the tables besides its own jobs: one file each, and here the lists.

There are two kinds. A `TickService` works in the tick's transaction, before the claim, so that a
job which it makes ready is claimed in the same commit. A `Housekeeping` service deletes or closes
old rows in small transactions between ticks. A new service needs its file and an entry in one of
the lists.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from django.db import Error

from relay_queue import conf, store
from relay_queue.logs import get_logger
from relay_queue.worker.database import SLICE_SECONDS
from relay_queue.worker.plan import Done, Plan, Point
from relay_queue.worker.services.fire import Fire
from relay_queue.worker.services.promote import Promote
from relay_queue.worker.services.prune import Prune
from relay_queue.worker.services.recover import RecoverDead, RecoverExpired
from relay_queue.worker.services.write_off import WriteOff

logger = get_logger("relay_queue.worker")

Bite = Callable[[store.Transaction, int], int]
"""Works on at most so many rows in one transaction, and returns on how many it has."""


class TickService(Protocol):
    """Work that belongs into the tick's transaction: recover, promote, fire schedules.

    ``step`` names it in log lines and in `Done.faults`, and ``point`` is the hook after it.
    ``Plan.due`` is set once a time of `looks.next_times` has come: a service that waits for another
    time adds it there, and an idle loop then wakes for it.
    """

    step: str
    point: Point | None

    def due(self, plan: Plan) -> bool:
        """Say whether there may be anything to do. Asked in every tick, so it must cost nothing."""

    def serve(
        self, tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None
    ) -> int:
        """Do it; return how many jobs were sent on. What fails may be rolled back and left undone.

        So ``done`` is written last. ``trial`` is given in a careful tick, for what is done row by
        row.
        """


class Housekeeping(Protocol):
    """Work that can wait, in bites between ticks: prune, write off, later a sweep."""

    def bites(self, settings: conf.RelaySettings) -> Iterator[Bite]:
        """Yield what is to be done in one round. Each bite is repeated until it finds few rows."""


IN_TICK: Final[tuple[TickService, ...]] = (RecoverDead(), RecoverExpired(), Promote(), Fire())
"""In their order: a job that is recovered may be due again, and is then promoted and claimed."""

BETWEEN_TICKS: Final[tuple[Housekeeping, ...]] = (Prune(), WriteOff())

INTERVAL_SECONDS = 60.0
BITE_ROWS = 1000
"""Rows of one transaction: the writer is free for others in between."""

BREATH_SECONDS = 0.2
"""Pause between two bites."""


class Housekeeper:
    """Takes a bite at a time between ticks. Workers start apart, so that one prunes for all."""

    def __init__(self) -> None:
        # Random, not soon: workers that start together must not all prune together.
        self.next_at = time.monotonic() + random.uniform(0.5, 1.5) * INTERVAL_SECONDS
        self._bites: deque[Bite] = deque()
        self._put_off: list[Bite] = []

    def due(self) -> bool:
        """Whether the next bite may be taken."""
        return time.monotonic() >= self.next_at

    def step(self) -> None:
        """Take one bite; a database that is busy or full is left alone for an interval."""
        if not self._bites:
            self._bites, self._put_off = deque(_round()), []
        bite = self._bites[0]
        try:
            # Never longer than a slice: this is the loop's thread, and it has time limits to keep.
            with store.transaction(wait_seconds=SLICE_SECONDS, first=True) as tx:
                rows = bite(tx, BITE_ROWS)
        except Error as error:
            # The next look finds out whether the connection is lost.
            logger.info("Pruning is put off: %s", error)
            self._put_behind(bite)
            self._rest()
            return
        self.next_at = time.monotonic() + BREATH_SECONDS
        if rows < BITE_ROWS:
            self._bites.popleft()
            if not self._bites:
                self._rest()

    def _put_behind(self, bite: Bite) -> None:
        """Take a bite that failed once more at the end of the round: it must not starve the others."""
        self._bites.popleft()
        if bite not in self._put_off:
            self._put_off.append(bite)
            self._bites.append(bite)

    def _rest(self) -> None:
        self.next_at = time.monotonic() + random.uniform(0.75, 1.25) * INTERVAL_SECONDS


def _round() -> Iterator[Bite]:
    settings = conf.get()
    for service in BETWEEN_TICKS:
        yield from service.bites(settings)
