"""Transitions: the one way in which a job comes, changes its state, ends and goes.

A verb writes the rows, since each has a statement of its own. Then it says here what it has
written. So the counters are exact, and no verb makes a step that `relay_queue.states` does not
allow. A feature that depends on a job's end has one place to hook into.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from relay_queue.logs import get_logger
from relay_queue.states import LAST_FAILURE, can
from relay_queue.store.transaction import Transaction

logger = get_logger("relay_queue.store")

JobInQueue = tuple[int, str]
"""The id of a job, and the name of its queue."""


def moved(
    tx: Transaction, jobs: Iterable[JobInQueue], before: str | None, after: str | None
) -> None:
    """Note that this transaction has taken jobs from one state to another.

    ``before`` is None for jobs that were inserted, ``after`` for jobs that were deleted. Raises
    ``ValueError`` for a step that the states do not allow; the transaction must not commit then.
    """
    if before is not None and after is not None and not can(before, after):
        raise ValueError(
            f"a verb took jobs from {before} to {after}, which the states do not allow"
        )
    for queue, n in Counter([queue for _, queue in jobs]).items():
        if before is not None:
            tx.count(queue, before, -n)
        if after is not None:
            tx.count(queue, after, n)


def moved_apart(tx: Transaction, steps: Iterable[tuple[int, str, str, str]]) -> None:
    """Note jobs that went different ways: the id, the queue, the state before and after of each."""
    groups: defaultdict[tuple[str, str], list[JobInQueue]] = defaultdict(list)
    for job_id, queue, before, after in steps:
        groups[before, after].append((job_id, queue))
    for (before, after), jobs in groups.items():
        moved(tx, jobs, before, after)


def note_death(tx: Transaction, job_id: int, why: str, message: str) -> None:
    """Log, once this is committed, that a job will not be tried again, and why.

    For a death of which no function's failure tells: its worker is gone, or its row is damaged.
    """
    tx.connection.on_commit(partial(_log_death, job_id, why, message))


def _log_death(job_id: int, why: str, message: str) -> None:
    with suppress(Exception):  # a handler that raises must not make the commit look failed
        logger.error(LAST_FAILURE, job_id, why, message)
