"""The ledger: the story of one job, and verdicts on many, by the leases alone.

The verdicts follow the rules of `relay_queue.verdict`, in SQL. Nearly all leases end as acked, and
a job has at most one such lease. So a verdict follows from the other leases, which have an index of
their own, and from the job's state. Only `ledger_totals` reads a whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from django.db.models import Case, CharField, Exists, OuterRef, Q, QuerySet, Value, When

from relay_queue import conf
from relay_queue.exceptions import JobNotFound
from relay_queue.models import Job, Lease
from relay_queue.query import reads
from relay_queue.states import ANSWERED, NOT_ACKED, Outcome, State, sql_list
from relay_queue.verdict import ANSWERING_VERBS, CUT_SHORT, Verdict, has_answered, judge

TROUBLED: Final = f"outcome IN ({sql_list(NOT_ACKED)})"
"""The leases in the index ``relay_lease_not_acked``: spelled as the index has it, so that it serves."""

SHOWN_TOKEN_CHARS: Final = 8

MOST_SHOWN: Final = 100
"""Leases of one job that are read to be shown, the newest ones."""

MOST_COUNTED: Final = 10_000
"""Leases of one job that are counted; beyond that there are just more."""

_ANSWERING: Final = ", ".join(f"'{verb}'" for verb in sorted(ANSWERING_VERBS))

_ANSWERED: Final = f"(outcome IN ({sql_list(ANSWERED)}) OR refused_verb IN ({_ANSWERING}))"

_BEGUN: Final = (
    f"{TROUBLED} AND (outcome <> '{Outcome.UNRUN.value}' OR refused_verb IN ({_ANSWERING}))"
)
"""Those among the troubled leases whose functions may have begun."""

COUNT: Final = f"""
    WITH troubled (job_id, answered, cut_short) AS (
        SELECT job_id, SUM(CASE WHEN {_ANSWERED} THEN 1 ELSE 0 END),
               SUM(CASE WHEN {_ANSWERED} THEN 0 ELSE 1 END)
        FROM relay_queue_lease WHERE {_BEGUN} GROUP BY job_id
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
"""Judge the jobs that have a lease with another end than acked. The verdict on the others follows
from their state."""

UNTROUBLED_RUNNING: Final = f"""
    SELECT COUNT(*) FROM relay_queue_lease held WHERE held.ended_at IS NULL AND NOT EXISTS (
        SELECT 1 FROM relay_queue_lease WHERE job_id = held.job_id AND {_BEGUN})
"""
"""Count the open leases of jobs that are at their first attempt."""

TOTALS: Final = """
    SELECT COALESCE(SUM(n), 0), COALESCE(SUM(CASE WHEN state = 'succeeded' THEN n ELSE 0 END), 0)
    FROM relay_queue_queuecount
"""
"""Read how many jobs there are, and how many of them have succeeded."""

LEDGER_TOTALS = """
    SELECT COALESCE(outcome, ''), count(*), count(refused_at) FROM relay_queue_lease
    GROUP BY COALESCE(outcome, '')
"""
"""Count all leases by outcome, and those whose owner came back late."""


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """All leases by outcome; open ones under ``open``. ``refused`` had an owner return late."""

    outcomes: dict[str, int]
    refused: int


@dataclass(frozen=True, slots=True)
class Story:
    """What the ledger tells about one job. ``verdict`` sums it up, ``detail`` says why.

    ``leases`` are the newest ``MOST_SHOWN``, oldest first, and ``older`` says how many more there
    are, up to ``MOST_COUNTED``. The verdict is on all of them.
    """

    job: Job
    leases: list[Lease]
    older: int
    verdict: Verdict
    detail: str


def shown_token(token: str) -> str:
    """Return enough of a lease's token to recognise it. The whole of it could settle the job."""
    return token[:SHOWN_TOKEN_CHARS]


def filter_by_verdict(jobs: QuerySet[Job], verdict: str) -> QuerySet[Job]:
    """Keep the jobs with a verdict. Raises `ValueError` if there is no such verdict."""
    return jobs.filter(condition(Verdict(verdict)))


def annotate_verdict(jobs: QuerySet[Job]) -> QuerySet[Any]:
    """Give each job its ``verdict``: for a page of them, since each costs a few probes."""
    cases = [When(condition(verdict), then=Value(verdict.value)) for verdict in Verdict]
    return jobs.annotate(verdict=Case(*cases, output_field=CharField()))


@cache
def condition(verdict: Verdict) -> Q:
    """Return a verdict as a condition on jobs: built once, since each page of a list asks for all."""
    late_answer = Q(refused_verb__in=ANSWERING_VERBS)
    again = _answered_twice()
    cut_short = Q(Exists(_others().filter(Q(outcome__in=CUT_SHORT) & ~late_answer)))
    running = Q(Exists(_leases().filter(ended_at__isnull=True)))
    started = Q(Exists(_leases().exclude(Q(outcome=Outcome.UNRUN) & ~late_answer)))
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


def count_verdicts() -> dict[Verdict, int]:
    """Count all jobs by verdict.

    Costs what the leases cost that ended otherwise than acked, and nothing for the others. Reads
    three times, so that jobs which move meanwhile may be counted by where they were or are.
    """
    counts = dict.fromkeys(Verdict, 0)
    ((jobs, succeeded),) = reads.rows(TOTALS)
    ((running,),) = reads.rows(UNTROUBLED_RUNNING)
    for verdict, acked, n in reads.rows(COUNT):
        counts[Verdict(verdict)] += n
        succeeded -= n if acked else 0
    counts[Verdict.RAN_ONCE] += max(0, int(succeeded))
    counts[Verdict.RUNNING] += running
    counts[Verdict.NEVER_STARTED] = max(0, int(jobs) - sum(counts.values()))
    return counts


def ledger_totals() -> LedgerTotals:
    """Count the whole ledger. Reads every lease: about a second for a million."""
    rows = reads.rows(LEDGER_TOTALS)
    return LedgerTotals(
        outcomes={outcome or "open": n for outcome, n, _ in sorted(rows)},
        refused=sum(refused for _, _, refused in rows),
    )


def story(job_id: int) -> Story:
    """Return the story of a job. Raises `JobNotFound`."""
    job = Job.objects.using(conf.get().database).filter(pk=job_id).first()
    if job is None:
        raise JobNotFound(job_id)
    ledger = Lease.objects.using(conf.get().database).filter(job=job_id)
    leases, older = newest(ledger.select_related("worker"))
    return Story(job, leases, older, verdict_on(job, leases, older), explain_verdict(leases))


def newest(ledger: QuerySet[Lease]) -> tuple[list[Lease], int]:
    """Return the newest leases of one job's ledger, oldest first, and how many older ones there are.

    A job may have a hundred thousand: at most ``MOST_SHOWN`` are read, and not more than
    ``MOST_COUNTED`` are counted.
    """
    found = list(ledger.order_by("-id")[: MOST_SHOWN + 1])
    leases = found[:MOST_SHOWN][::-1]
    if len(found) == len(leases):
        return leases, 0
    return leases, ledger.order_by()[:MOST_COUNTED].count() - len(leases)


def verdict_on(job: Job, leases: Sequence[Lease], older: int) -> Verdict:
    """Return the verdict on a job: from its leases, or by probes if there are ``older`` ones."""
    if not older:
        return judge(leases)
    jobs = annotate_verdict(Job.objects.using(conf.get().database).filter(pk=job.pk))
    found = jobs.values_list("verdict", flat=True).first()
    return judge(leases) if found is None else Verdict(found)  # deleted meanwhile


def counted(number: int) -> str:
    """Return a number of leases for people: beyond ``MOST_COUNTED`` nobody has counted."""
    return f"{number:,}" if number < MOST_COUNTED - MOST_SHOWN else f"{number:,} or more"


def explain_verdict(leases: Sequence[Lease]) -> str:
    """Say what the verdict on a job rests on, given its leases."""
    ended = [lease for lease in leases if lease.outcome]
    answered = [_named(lease) for lease in ended if has_answered(lease)]
    others = [lease for lease in ended if not has_answered(lease)]
    cut_short = [_named(lease) for lease in others if lease.outcome in CUT_SHORT]
    unrun = len(others) - len(cut_short)
    under_way = [str(lease.attempt) for lease in leases if lease.outcome is None]
    lines = [f"attempts that answered: {', '.join(answered)}"] if answered else []
    lines += [f"attempts cut short: {', '.join(cut_short)}"] if cut_short else []
    lines += [f"attempt {number} is under way" for number in under_way]
    lines += [f"handed back before the function began: {unrun}"] if unrun else []
    return "; ".join(lines) or "it was never leased"


def _leases() -> QuerySet[Lease]:
    return Lease.objects.filter(job=OuterRef("pk"))


def _others() -> QuerySet[Lease]:
    """The leases of a job that ended otherwise than acked."""
    return _leases().filter(outcome__in=NOT_ACKED)


def _answered_twice() -> Q:
    answers = _others().filter(Q(outcome__in=ANSWERED) | Q(refused_verb__in=ANSWERING_VERBS))
    # The second one is looked for: to count them would read a whole long ledger.
    return Q(Exists(answers)) & (Q(state=State.SUCCEEDED) | Q(Exists(answers[1:2])))


def _named(lease: Lease) -> str:
    """Name an attempt, with its end if that is no answer, and the verb of a late answer."""
    if lease.outcome in ANSWERED:
        return str(lease.attempt)
    late = f", late {lease.refused_verb}" if has_answered(lease) else ""
    return f"{lease.attempt} ({lease.outcome}{late})"
