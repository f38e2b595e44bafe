"""The end of a process whose own functions do not end, or keep the whole project from writing."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from django.db import connections

from relay_queue import conf
from relay_queue.db.gate import gate_of
from relay_queue.worker.lifetime import leave
from relay_queue.worker.words import shown_ids

logger = logging.getLogger("relay_queue.worker")

EXIT_STUCK = 71
"""Exit code when every slot is held by a function that does not end."""

EXIT_HOGGED = 72
"""Exit code of a process whose function held the writer for too long."""

HOGGED_SECONDS = 1.0
"""How long the end of such a process may take: nobody can write meanwhile."""

STUCK_GRACE_SECONDS = 5.0
"""How long all slots must be stuck before the process is given up."""


class StuckWatch:
    """Watches for a process that has no usable slot any more.

    Not at once: a function whose lease has ended gets time to notice it. The caller has taken what
    has finished: a slot whose function has returned is not stuck.
    """

    def __init__(self) -> None:
        self.given_up_at: float | None = None

    def given_up(self, stuck: int, places: int) -> bool:
        """Say whether all slots have been stuck for the whole grace; ``stuck`` of ``places`` are."""
        if not stuck or stuck < places:
            self.given_up_at = None
            return False
        now = time.monotonic()
        self.given_up_at = self.given_up_at or now + STUCK_GRACE_SECONDS
        if now < self.given_up_at:
            return False
        logger.error(
            "Every slot is held by a function that does not end: %d leases are over for %g s and more. "
            "Exiting; other workers have their jobs.",
            stuck,
            STUCK_GRACE_SECONDS,
        )
        return True


def exit_if_gate_is_hogged(stuck_threads: Collection[int], in_hand: Collection[int]) -> None:
    """End this process if one of its slots has held the gate for longer than is allowed.

    For a thread among ``stuck_threads``, whose function is past its time limit, the limit of an
    atomic function applies. A normal exit would wait for the stuck thread, so the process ends where it stands;
    the kernel drops gate and liveness lock, and the next worker recovers its jobs. Those of the jobs
    ``in_hand`` run again, too: the thread that holds the writer keeps their outcomes from it.
    """
    settings = conf.get()
    gate = gate_of(connections[settings.database])
    held = None if gate is None else gate.held_seconds()
    if held is None:
        return
    stuck = held[0] in stuck_threads
    limit = settings.atomic_max_seconds if stuck else settings.gate_hold_seconds
    if held[1] > limit:
        logger.critical(
            "Thread %s has held the writer for %.1f s, more than the %g s allowed. "
            "This process ends; another worker takes its jobs.",
            held[0],
            held[1],
            limit,
        )
        if in_hand:
            logger.critical(
                "The outcomes of %d jobs could not be written meanwhile, and they run again: %s.",
                len(in_hand),
                shown_ids(in_hand),
            )
        leave(EXIT_HOGGED, seconds=HOGGED_SECONDS)
