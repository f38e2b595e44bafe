"""Verdicts in the database: filter jobs by them, and count them, without reading the finished jobs.

The same rules as in `relay_queue.verdict`. Nearly all leases end as acked, and a job has at most one
such, so everything is told by the others, which have an index of their own, and by the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from django.db import connections
from django.db.models import (
    Case,
    CharField,
    Count,
    Exists,
    IntegerField,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Value,
    When,
)
from django.db.models.functions import Coalesce
from django.db.models.lookups import GreaterThan

from relay_queue import conf
from relay_queue.models import Job, Lease
from relay_queue.states import ANSWERED, NOT_ACKED, State
from relay_queue.verdict import ANSWERING_VERBS, CUT_SHORT, Verdict


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


TROUBLED: Final = f"outcome IN ({_listed(NOT_ACKED)})"
"""The leases in the index ``relay_lease_not_acked``: spelled as the index has it, so that it serves."""

_ANSWERED: Final = (
    f"(outcome IN ({_listed(sorted(ANSWERED))})"
    f" OR refused_verb IN ({_listed(sorted(ANSWERING_VERBS))}))"
)

COUNT: Final = f"""
    WITH troubled (job_id, answered, cut_short) AS (
        SELECT job_id, SUM(CASE WHEN {_ANSWERED} THEN 1 ELSE 0 END),
               SUM(CASE WHEN {_ANSWERED} THEN 0 ELSE 1 END)
        FROM relay_queue_lease WHERE {TROUBLED} GROUP BY job_id
    ), judged (job_id, acked, verdict) AS (
        SELECT t.job_id, j.state = 'succeeded', CASE
            WHEN t.answered > 1 OR (t.answered = 1 AND j.state = 'succeeded') THEN 'repeated'
            WHEN t.cut_short > 0 THEN 'interrupted'
            WHEN j.state = 'running' THEN 'running'
            ELSE 'once' END
        FROM troubled t JOIN relay_queue_job j ON j.id = t.job_id
    )
    SELECT verdict, acked, COUNT(*) FROM judged GROUP BY verdict, acked
"""
"""Judge the jobs that have a lease which ended otherwise than acked: the others are told by state."""

UNTROUBLED_RUNNING: Final = f"""
    SELECT COUNT(*) FROM relay_queue_lease held WHERE held.ended_at IS NULL AND NOT EXISTS (
        SELECT 1 FROM relay_queue_lease WHERE job_id = held.job_id AND {TROUBLED})
"""
"""Count the open leases of jobs that are at their first attempt."""

TOTALS: Final = """
    SELECT COALESCE(SUM(n), 0), COALESCE(SUM(CASE WHEN state = 'succeeded' THEN n ELSE 0 END), 0)
    FROM relay_queue_queuecount
"""
"""Read how many jobs there are, and how many of them have succeeded."""


def filter_by(jobs: QuerySet[Job], verdict: str) -> QuerySet[Job]:
    """Keep the jobs with a verdict. Raises `ValueError` if there is no such verdict."""
    return jobs.filter(condition(Verdict(verdict)))


def annotate(jobs: QuerySet[Job]) -> QuerySet[Any]:
    """Give each job its ``verdict``: for a page of them, since each costs a few probes."""
    cases = [When(condition(verdict), then=Value(verdict.value)) for verdict in Verdict]
    return jobs.annotate(verdict=Case(*cases, output_field=CharField()))


@cache
def condition(verdict: Verdict) -> Q:
    """Return a verdict as a condition on jobs: built once, since each page of a list asks for all."""
    again, cut_short = _answered_twice(), Q(Exists(_others().filter(_cut_short())))
    running = Q(Exists(_leases().filter(ended_at__isnull=True)))
    started = Q(Exists(_leases()))
    match verdict:
        case Verdict.RAN_AGAIN:
            return again
        case Verdict.INTERRUPTED:
            return cut_short & ~again
        case Verdict.RUNNING:
            return running & ~cut_short & ~again
        case Verdict.RAN_ONCE:
            return started & ~running & ~cut_short & ~again
        case Verdict.NEVER_STARTED:
            return ~started


def count() -> dict[Verdict, int]:
    """Count all jobs by verdict.

    Costs what the leases cost that ended otherwise than acked, and nothing for the others. Reads
    three times, so that jobs which move meanwhile may be counted by where they were or are.
    """
    counts = dict.fromkeys(Verdict, 0)
    with connections[conf.get().database].cursor() as cursor:
        cursor.execute(TOTALS)
        ((jobs, succeeded),) = cursor.fetchall()
        cursor.execute(UNTROUBLED_RUNNING)
        ((running,),) = cursor.fetchall()
        cursor.execute(COUNT)
        judged = cursor.fetchall()
    for verdict, acked, n in judged:
        counts[Verdict(verdict)] += n
        succeeded -= n if acked else 0
    counts[Verdict.RAN_ONCE] += max(0, int(succeeded))
    counts[Verdict.RUNNING] += running
    counts[Verdict.NEVER_STARTED] = max(0, int(jobs) - sum(counts.values()))
    return counts


def _leases() -> QuerySet[Lease]:
    return Lease.objects.filter(job=OuterRef("pk"))


def _others() -> QuerySet[Lease]:
    """The leases of a job that ended otherwise than acked."""
    return _leases().filter(outcome__in=NOT_ACKED)


def _cut_short() -> Q:
    return Q(outcome__in=CUT_SHORT) & ~Q(refused_verb__in=ANSWERING_VERBS)


def _answered_twice() -> Q:
    answers = _others().filter(Q(outcome__in=ANSWERED) | Q(refused_verb__in=ANSWERING_VERBS))
    number = answers.order_by().values("job").annotate(n=Count("pk")).values("n")
    several = GreaterThan(Coalesce(Subquery(number, output_field=IntegerField()), 0), 1)
    return Q(Exists(answers)) & (Q(state=State.SUCCEEDED) | Q(several))
