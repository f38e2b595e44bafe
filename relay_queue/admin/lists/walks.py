"""Which index to walk for what was asked of the list of jobs, and of the list of leases.

A walk need not decide everything: what it leaves is looked up row by row. So the choice is by what
leaves the fewest rows to look at, and a criterion that no index knows is never wrong, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from django.db import connections

from relay_queue import conf
from relay_queue.admin.lists.criteria import Criteria, Span
from relay_queue.admin.lists.names import Names
from relay_queue.admin.lists.walk import Branch, Walk
from relay_queue.query.ledger import TROUBLED
from relay_queue.states import NOT_DUE, TERMINAL, State, sql_list
from relay_queue.store.dialects import dialect_for
from relay_queue.verdict import Verdict

JOBS: Final = "relay_queue_job"
LEASES: Final = "relay_queue_lease"
MOST_BRANCHES: Final = 100
"""Stretches of an index that are merged; more are slower than to look at the jobs one by one."""

WAITING: Final = f"state IN ({sql_list(NOT_DUE)})"
READY: Final = "state = 'ready'"
_ENDED: Final = "finished_at IS NOT NULL AND state = %s"
_BY_ID: Final = Walk(JOBS, (Branch("1 = 1"),))

_Choice = Callable[[Criteria, Names], Walk | None]


def jobs(asked: Criteria, names: Names) -> Walk:
    """Choose the walk over jobs: by the newest id if nothing better serves."""
    for choice in _JOB_CHOICES:
        walk = choice(asked, names)
        if walk is not None and len(walk.branches) <= MOST_BRANCHES:
            return walk
    return _BY_ID


def leases(asked: Criteria, names: Names) -> Walk:
    """Choose the walk over leases: the newest first."""
    if asked.ids is not None:
        marks = ", ".join(["%s"] * len(asked.ids)) or "NULL"
        return Walk(LEASES, (Branch(f"job_id IN ({marks})", asked.ids),), covers=_names("ids"))
    if asked.presence.get("refused_at"):
        return Walk(LEASES, (Branch("refused_at IS NOT NULL"),), key="refused_at")
    if asked.presence.get("ended_at") is False:
        return Walk(LEASES, (Branch("ended_at IS NULL"),), gather=True)
    if asked.outcomes and "acked" not in asked.outcomes:
        marks = ", ".join(["%s"] * len(asked.outcomes))
        where = Branch(f"{TROUBLED} AND outcome IN ({marks})", asked.outcomes)
        return Walk(LEASES, (where,), gather=True, covers=_names("outcomes"))
    return Walk(LEASES, (Branch("1 = 1"),))


def _by_ids(asked: Criteria, names: Names) -> Walk | None:
    if asked.ids is None:
        return None
    marks = ", ".join(["%s"] * len(asked.ids)) or "NULL"
    return Walk(JOBS, (Branch(f"id IN ({marks})", asked.ids),), covers=_names("ids"))


def _by_key(asked: Criteria, names: Names) -> Walk | None:
    if not asked.key:
        return None
    where = "idempotency_key IS NOT NULL AND queue = %s AND idempotency_key = %s"
    queues = [asked.queue] if asked.queue else names.queues
    branches = tuple(Branch(where, [queue, asked.key]) for queue in queues)
    return Walk(JOBS, branches, covers=_names("key", "queue")) if branches else None


def _by_trouble(asked: Criteria, names: Names) -> Walk | None:
    """Only a job with a lease that was not acked can have been interrupted or run twice."""
    if asked.verdict not in {Verdict.INTERRUPTED, Verdict.RAN_AGAIN}:
        return None
    return Walk(LEASES, (Branch(TROUBLED),), key="job_id", id="job_id", distinct=True)


def _by_error(asked: Criteria, names: Names) -> Walk | None:
    """Look at the jobs with an error, the newest first; the text is looked at row by row.

    No index finds a part of a text, so the walk must not decide it: it would read every error.
    """
    if not asked.error:
        return None
    return Walk(JOBS, (Branch("last_error > ''"),))


def _running(asked: Criteria, names: Names) -> Walk | None:
    """A job runs while it has an open lease, and of those there are only as many as slots."""
    if State.RUNNING not in {asked.state} and asked.verdict != Verdict.RUNNING:
        return None
    return Walk(LEASES, (Branch("ended_at IS NULL"),), key="job_id", id="job_id")


def _finished(asked: Criteria, names: Names) -> Walk | None:
    states = [asked.state] if asked.state else sorted(TERMINAL)
    if not TERMINAL.issuperset(states) or not (asked.state or asked.finished):
        return None
    if asked.state == State.SUCCEEDED and _has_place(asked) and not asked.finished:
        return None
    where, span = _within("finished_at", asked.finished)
    branches = tuple(Branch(_ENDED + where, [state, *span]) for state in states)
    return Walk(JOBS, branches, key="finished_at", covers=_names("state", "finished"))


def _waiting(asked: Criteria, names: Names) -> Walk | None:
    if asked.state not in {State.SCHEDULED, State.RETRYING} and not asked.due:
        return None
    where, params = _within("available_at", asked.due)
    if asked.state:
        where, params = f"{where} AND state = %s", [*params, asked.state]
    branch = Branch(WAITING + where, params)
    covers = _names("state", "due")
    return Walk(JOBS, (branch,), key="available_at", descending=False, covers=covers)


def _ready(asked: Criteria, names: Names) -> Walk | None:
    """Ready jobs in the order in which they will be claimed."""
    if asked.state != State.READY or asked.task or asked.task_prefix or asked.created:
        return None
    queues = [asked.queue] if asked.queue else names.queues
    branches = tuple(Branch(f"{READY} AND queue = %s", [queue]) for queue in queues)
    covers = _names("state", "queue")
    return Walk(JOBS, branches, key="rank", descending=False, covers=covers) if branches else None


def _never_started(asked: Criteria, names: Names) -> Walk | None:
    """These are in one of the indexes of unfinished jobs, or were buried or cancelled unrun."""
    if asked.verdict != Verdict.NEVER_STARTED or asked.state or _has_place(asked):
        return None
    ended = (Branch(_ENDED, [state]) for state in (State.DEAD, State.CANCELLED))
    return Walk(JOBS, (Branch(READY), Branch(WAITING), *ended), gather=True)


def _listing(asked: Criteria, names: Names) -> Walk | None:
    """Walk by the time of creation in each queue and task that can be meant."""
    if not (_has_place(asked) or asked.created):
        return None
    if asked.task:
        queues = [asked.queue] if asked.queue else names.queues
        pairs = [(queue, asked.task) for queue in queues]
    elif names.cut_short:
        return None
    else:
        pairs = [
            (queue, task)
            for queue, task in names.pairs
            if (not asked.queue or queue == asked.queue) and task.startswith(asked.task_prefix)
        ]
    where, params = _within("created_at", asked.created)
    stretch = f"queue = %s AND task = %s{where}"
    branches = tuple(Branch(stretch, [*pair, *params]) for pair in pairs)
    covers = _names("queue", "task", "task_prefix", "created")
    # With no such pair there is no such job.
    return Walk(JOBS, branches or (Branch("1 = 0"),), key="created_at", covers=covers)


_JOB_CHOICES: Final[Sequence[_Choice]] = (
    _by_ids,
    _by_key,
    _running,
    _by_trouble,
    _by_error,
    _finished,
    _waiting,
    _ready,
    _never_started,
    _listing,
)


def _has_place(asked: Criteria) -> bool:
    return bool(asked.queue or asked.task or asked.task_prefix)


def _within(column: str, span: Span) -> tuple[str, list[Any]]:
    to_db = dialect_for(connections[conf.get().database]).to_db
    where, params = "", []
    if span.since is not None:
        where, params = f" AND {column} >= %s", [to_db(span.since)]
    if span.until is not None:
        where, params = f"{where} AND {column} <= %s", [*params, to_db(span.until)]
    return where, params


def _names(*names: str) -> frozenset[str]:
    return frozenset(names)
