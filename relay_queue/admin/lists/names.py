"""Which queues and tasks there are, found by skipping along an index instead of reading the jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.contrib.admin import AdminSite
from django.db import connections
from django.db.models import QuerySet
from django.db.models.expressions import RawSQL
from django.http import HttpRequest

from relay_queue import conf
from relay_queue.admin import sight

MOST_PAIRS: Final = 300
"""Pairs of a queue and a task that are looked for; each costs one probe of the index."""

PAIRS: Final = f"""
    WITH RECURSIVE pair (queue, task) AS (
        SELECT q.name, (SELECT MIN(task) FROM relay_queue_job WHERE queue = q.name)
        FROM relay_queue_queue q
        UNION ALL
        SELECT pair.queue, (SELECT MIN(j.task) FROM relay_queue_job j
                            WHERE j.queue = pair.queue AND j.task > pair.task)
        FROM pair WHERE pair.task IS NOT NULL
    )
    SELECT queue, task FROM pair LIMIT {2 * MOST_PAIRS + 1}
"""
"""Find each queue with each of its tasks; a queue also comes once without a task."""

_KEPT_AS: Final = "_relay_names"
_SHOWN_AS: Final = "_relay_names_shown"

LOOKED_AT_FOR_NAME: Final = 100
"""The newest jobs of a queue and a task among which one is looked for that a person may see."""

SEEN: Final = """
    EXISTS (SELECT 1 FROM (
        SELECT id FROM relay_queue_job WHERE queue = %s AND task = %s
        ORDER BY created_at DESC, id DESC LIMIT {most}) s WHERE EXISTS ({seen}))
"""
"""Say whether one of the newest jobs of a queue and a task may be seen."""


@dataclass(frozen=True, slots=True)
class Names:
    """The queues, and the pairs of a queue and a task that have jobs, in the order of their names.

    ``cut_short`` says that there are more pairs than `MOST_PAIRS`.
    """

    queues: list[str]
    pairs: list[tuple[str, str]]
    cut_short: bool = False

    @property
    def tasks(self) -> list[str]:
        """The tasks that have jobs."""
        return sorted({task for _, task in self.pairs})


def read() -> Names:
    """Read the names: one statement, whatever the number of jobs."""
    with connections[conf.get().database].cursor() as cursor:
        cursor.execute(PAIRS)
        rows = cursor.fetchall()
    pairs = sorted((queue, task) for queue, task in rows if task is not None)
    queues = sorted({queue for queue, _ in rows})
    return Names(queues, pairs[:MOST_PAIRS], len(pairs) > MOST_PAIRS)


def of(request: HttpRequest) -> Names:
    """Return the names, read once for a request."""
    kept: Any = getattr(request, _KEPT_AS, None)
    if kept is None:
        kept = read()
        setattr(request, _KEPT_AS, kept)
    return kept  # type: ignore[no-any-return]


def shown(request: HttpRequest, site: AdminSite) -> Names:
    """Return the names to offer to whoever asks: those of jobs that they may see at a site.

    A walk goes by `of`, since it finds nothing in a queue that it does not know of.
    """
    kept: Any = getattr(request, _SHOWN_AS, None)
    if kept is None:
        kept = of(request)
        if sight.limits_jobs(request, site):
            kept = _seen(kept, sight.jobs(request, site))
        setattr(request, _SHOWN_AS, kept)
    return kept  # type: ignore[no-any-return]


def _seen(known: Names, jobs: QuerySet[Any]) -> Names:
    """Keep the names of jobs among ``jobs``."""
    alias = conf.get().database
    one = jobs.order_by().filter(pk=RawSQL("s.id", ())).values("pk").query
    sql, params = one.get_compiler(alias, elide_empty=False).as_sql()
    condition = SEEN.format(most=LOOKED_AT_FOR_NAME, seen=sql)
    pairs = []
    with connections[alias].cursor() as cursor:
        for pair in known.pairs:
            cursor.execute(f"SELECT 1 WHERE {condition}", [*pair, *params])
            if cursor.fetchone():
                pairs.append(pair)
    return Names(sorted({queue for queue, _ in pairs}), pairs, known.cut_short)
