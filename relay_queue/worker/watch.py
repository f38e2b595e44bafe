"""The end of a process whose own function keeps the whole project from writing."""

from __future__ import annotations

import logging
import os

from django.db import connections

from relay_queue import conf
from relay_queue.db.gate import gate_of

logger = logging.getLogger("relay_queue.worker")

EXIT_HOGGED = 72
"""Exit code of a process whose function held the writer for too long."""


def exit_if_gate_is_hogged(overdue: bool) -> None:
    """End this process if one of its slots has held the gate for longer than is allowed.

    ``overdue`` says that a function is past its time limit; then the limit of an atomic function
    applies. A normal exit would wait for the stuck thread, so the process ends where it stands;
    the kernel drops gate and liveness lock, and the next worker recovers its jobs.
    """
    settings = conf.get()
    gate = gate_of(connections[settings.database])
    held = None if gate is None else gate.held_seconds()
    if held is None:
        return
    limit = settings.atomic_max_seconds if overdue else settings.gate_hold_seconds
    if held[1] > limit:
        logger.critical(
            "Thread %s has held the writer for %.1f s, more than the %g s allowed. "
            "This process ends; another worker takes its jobs.",
            held[0],
            held[1],
            limit,
        )
        logging.shutdown()
        os._exit(EXIT_HOGGED)
