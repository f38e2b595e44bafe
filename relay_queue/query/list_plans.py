"""Which index to scan for what was asked of the list of jobs, and of the list of leases.

A scan need not decide everything: rows are checked for the other criteria one by one. So each plan
is chosen to leave few rows to check. A criterion that no index knows makes a list slower, never
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Final

from relay_queue.query import reads
from relay_queue.query.ledger import TROUBLED
from relay_queue.query.lists import Branch, IndexScan, Names
from relay_queue.states import NOT_DUE, TERMINAL, State, sql_list
from relay_queue.store.dialects import marks
from relay_queue.verdict import Verdict

JOBS: Final = "relay_queue_job"
LEASES: Final = "relay_queue_lease"
MOST_BRANCHES: Final = 100
"""Stretches of an index that are merged; more are slower than to check the jobs one by one."""

WAITING: Final = f"state IN ({sql_list(NOT_DUE)})"
READY: Final = "state = 'ready'"
_ENDED: Final = "finished_at IS NOT NULL AND state = %s"
_BY_ID: Final = IndexScan(JOBS, (Branch("1 = 1"),))


@dataclass(slots=True)
class Span:
    """A range of times, both ends included; None is open."""

    since: datetime | None = None
    until: datetime | None = None

    def __bool__(self) -> bool:
        """Whether it excludes anything."""
        return self.since is not None or self.until is not None


@dataclass(slots=True)
class Criteria:
    """The filters and the search of one request. An empty value asks for nothing.

    ``others`` names conditions that no plan knows; rows are then checked one by one.
    """

    state: str = ""
    queue: str = ""
    task: str = ""
    task_prefix: str = ""
    key: str = ""
    error: str = ""
    verdict: str = ""
    outcomes: list[str] = field(default_factory=list)
    presence: dict[str, bool] = field(default_factory=dict)
    ids: list[int] | None = None
    created: Span = field(default_factory=Span)
    due: Span = field(default_factory=Span)
    finished: Span = field(default_factory=Span)
    others: set[str] = field(default_factory=set)

    @property
    def asked(self) -> frozenset[str]:
        """The names of what was asked for."""
        return frozenset(
            item.name
            for item in fields(self)
            if getattr(self, item.name) or (item.name == "ids" and self.ids is not None)
        )


_Choice = Callable[[Criteria, Names], IndexScan | None]


def jobs(asked: Criteria, names: Names) -> IndexScan:
    """Choose the scan of jobs: by the newest id if no other plan serves."""
    for choice in _JOB_CHOICES:
        scan = choice(asked, names)
        if scan is not None and 0 < len(scan.branches) <= MOST_BRANCHES:
            return scan
    return _BY_ID


def leases(asked: Criteria, names: Names) -> IndexScan:
    """Choose the scan of leases: the newest first."""
    if asked.ids is not None:
        return _with_ids(LEASES, "job_id", asked.ids)
    if asked.presence.get("refused_at"):
        return IndexScan(LEASES, (Branch("refused_at IS NOT NULL"),), key="refused_at")
    if asked.presence.get("ended_at") is False:
        return IndexScan(LEASES, (Branch("ended_at IS NULL"),), gather=True)
    if asked.outcomes and "acked" not in asked.outcomes:
        outcomes = marks(len(asked.outcomes))
        where = Branch(f"{TROUBLED} AND outcome IN ({outcomes})", asked.outcomes)
        return IndexScan(LEASES, (where,), gather=True, covers=_names("outcomes"))
    return IndexScan(LEASES, (Branch("1 = 1"),))


def _by_ids(asked: Criteria, names: Names) -> IndexScan | None:
    return None if asked.ids is None else _with_ids(JOBS, "id", asked.ids)


def _by_key(asked: Criteria, names: Names) -> IndexScan | None:
    if not asked.key:
        return None
    where = "idempotency_key IS NOT NULL AND queue = %s AND idempotency_key = %s"
    queues = [asked.queue] if asked.queue else names.queues
    branches = tuple(Branch(where, [queue, asked.key]) for queue in queues)
    return IndexScan(JOBS, branches, covers=_names("key", "queue"))


def _by_trouble(asked: Criteria, names: Names) -> IndexScan | None:
    """Scan the leases that were not acked: every interrupted or repeated job has one."""
    if asked.verdict not in {Verdict.INTERRUPTED, Verdict.RAN_AGAIN}:
        return None
    return IndexScan(LEASES, (Branch(TROUBLED),), key="job_id", id="job_id", distinct=True)


def _by_error(asked: Criteria, names: Names) -> IndexScan | None:
    """Scan the jobs with an error, the newest first; the text is checked row by row.

    No index finds a part of a text. If the scan decided it, one page would read every error.
    """
    if not asked.error:
        return None
    return IndexScan(JOBS, (Branch("last_error > ''"),))


def _running(asked: Criteria, names: Names) -> IndexScan | None:
    """Scan the open leases: a running job has one, and there are only as many as slots."""
    if State.RUNNING not in {asked.state} and asked.verdict != Verdict.RUNNING:
        return None
    return IndexScan(LEASES, (Branch("ended_at IS NULL"),), key="job_id", id="job_id")


def _finished(asked: Criteria, names: Names) -> IndexScan | None:
    states = [asked.state] if asked.state else sorted(TERMINAL)
    if not TERMINAL.issuperset(states) or not (asked.state or asked.finished):
        return None
    if asked.state == State.SUCCEEDED and _has_place(asked) and not asked.finished:
        return None
    where, span = _within("finished_at", asked.finished)
    branches = tuple(Branch(_ENDED + where, [state, *span]) for state in states)
    return IndexScan(JOBS, branches, key="finished_at", covers=_names("state", "finished"))


def _waiting(asked: Criteria, names: Names) -> IndexScan | None:
    if asked.state not in {State.SCHEDULED, State.RETRYING} and not asked.due:
        return None
    where, params = _within("available_at", asked.due)
    if asked.state:
        where, params = f"{where} AND state = %s", [*params, asked.state]
    branch = Branch(WAITING + where, params)
    covers = _names("state", "due")
    return IndexScan(JOBS, (branch,), key="available_at", descending=False, covers=covers)


def _ready(asked: Criteria, names: Names) -> IndexScan | None:
    """Scan the ready jobs in the order in which they will be claimed."""
    if asked.state != State.READY or asked.task or asked.task_prefix or asked.created:
        return None
    queues = [asked.queue] if asked.queue else names.queues
    branches = tuple(Branch(f"{READY} AND queue = %s", [queue]) for queue in queues)
    covers = _names("state", "queue")
    return IndexScan(JOBS, branches, key="rank", descending=False, covers=covers)


def _never_started(asked: Criteria, names: Names) -> IndexScan | None:
    """Scan the indexes of unfinished jobs, and the jobs that went dead or were cancelled."""
    if asked.verdict != Verdict.NEVER_STARTED or asked.state or _has_place(asked):
        return None
    ended = (Branch(_ENDED, [state]) for state in (State.DEAD, State.CANCELLED))
    return IndexScan(JOBS, (Branch(READY), Branch(WAITING), *ended), gather=True)


def _listing(asked: Criteria, names: Names) -> IndexScan | None:
    """Scan by the time of creation in each queue and task that the criteria admit."""
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
    # Without such a pair there is no such job.
    return IndexScan(JOBS, branches or (Branch("1 = 0"),), key="created_at", covers=covers)


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


def _with_ids(table: str, column: str, ids: Sequence[int]) -> IndexScan:
    where = f"{column} IN ({marks(len(ids)) or 'NULL'})"
    return IndexScan(table, (Branch(where, ids),), covers=_names("ids"))


def _has_place(asked: Criteria) -> bool:
    return bool(asked.queue or asked.task or asked.task_prefix)


def _within(column: str, span: Span) -> tuple[str, list[Any]]:
    to_db = reads.dialect().to_db
    where, params = "", []
    if span.since is not None:
        where, params = f" AND {column} >= %s", [to_db(span.since)]
    if span.until is not None:
        where, params = f"{where} AND {column} <= %s", [*params, to_db(span.until)]
    return where, params


def _names(*names: str) -> frozenset[str]:
    return frozenset(names)
