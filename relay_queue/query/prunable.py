"""How many rows a prune would delete: what ``relay prune --dry-run`` shows.

The conditions are those of `relay_queue.store.prune`. A later prune finds what is old then, which may be more.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from relay_queue.query import reads
from relay_queue.states import TERMINAL
from relay_queue.store.prune import OLD_BULK_ACTS, OLD_RUNS, OLD_WORKERS

COUNT_JOBS: Final = "SELECT COUNT(*) FROM relay_queue_job WHERE state = %s AND finished_at < %s"
"""Count the old jobs of a state: a walk along the finished index."""

COUNTS: Final = {
    "workers": f"SELECT COUNT(*) FROM {OLD_WORKERS}",
    "minutes": "SELECT COUNT(*) FROM relay_queue_queueminute WHERE minute < %s",
    "bulk_acts": f"SELECT COUNT(*) FROM {OLD_BULK_ACTS}",
    "runs": f"SELECT COUNT(*) FROM {OLD_RUNS}",
}
"""Count the old rows of each other kind, by the name that ``relay prune`` gives it."""


def count(kind: str, before: datetime) -> int:
    """Return how many rows of a kind are older than a time.

    ``kind`` is a terminal state, for jobs, or one of `COUNTS`. Raises ``ValueError`` for another.
    """
    moment = reads.dialect().to_db(before)
    if kind in TERMINAL:
        found = reads.rows(COUNT_JOBS, kind, moment)
    elif kind in COUNTS:
        statement = COUNTS[kind]
        found = reads.rows(statement, *[moment] * statement.count("%s"))
    else:
        raise ValueError(f"{kind!r} is nothing that is pruned")
    return int(found[0][0])
