"""The content of the page of one job, read with the same few statements for every job.

Its picture shows the path of the job through the states, as far as its leases record it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, Final, NamedTuple

from django.contrib.admin import AdminSite
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _

from relay_queue.admin import formatting, sight, texts
from relay_queue.admin.dashboard.links import Links
from relay_queue.admin.formatting import Fact
from relay_queue.models import Job, Lease, Queue
from relay_queue.quantities import duration
from relay_queue.query import ledger
from relay_queue.ranking import effective_priority
from relay_queue.states import TRANSITIONS, Outcome, State

MOST_RELATED: Final = 5
STEPS_SHOWN: Final = 24


_AFTER: Final[dict[str, State]] = {
    Outcome.ACKED: State.SUCCEEDED,
    Outcome.FAILED: State.RETRYING,
    Outcome.TIMED_OUT: State.RETRYING,
    Outcome.FATAL: State.DEAD,
    Outcome.SNOOZED: State.SCHEDULED,
    Outcome.CANCELLED: State.CANCELLED,
}
"""The state after each attempt but the last, after which the job itself has the state.

After any other outcome the job is ready.
"""

_CHARGED_ENDS: Final = frozenset({Outcome.FAILED, Outcome.TIMED_OUT, Outcome.EXPIRED, Outcome.LOST})


def context(request: HttpRequest, job: Job, site: AdminSite) -> dict[str, Any]:
    """Return the context of the template, as far as this person may see the job at this site."""
    now = sight.now(request)
    leases, older = _leases(request, job, site)
    queue = sight.whole(Queue).filter(pk=job.queue).first()
    may_see = sight.may_view_payload(request, site)
    return {
        "job": job,
        "state": formatting.state_badge(job.state),
        "last_error": texts.last_error(job, leases[-1] if leases else None, may_see=may_see),
        "facts": _facts(job, leases, queue, now, may_see=may_see),
        "way": _path(job, leases),
        "options": _options(job),
        "may_see_payload": may_see,
        "arguments": texts.arguments(job.task, job.payload) if may_see else "",
        "result": texts.result(job.task, job.result) if may_see else "",
        "related": _related(sight.jobs(request, site), job, now, by_key=may_see),
        **_ledger(leases, job, older, now, Links(request, site), may_see=may_see),
    }


def _leases(request: HttpRequest, job: Job, site: AdminSite) -> tuple[list[Any], int]:
    """Return the newest attempts, oldest first, and how many older ones there are.

    None for those who may not view leases.
    """
    if not sight.may_view(request, site, Lease):
        return [], 0
    leases, older = ledger.newest(sight.leases(request, site).filter(job=job.pk))
    sight.name_workers(request, site, leases)
    for lease in leases:
        lease.job = job  # otherwise each lease would read it again
    return leases, older


def _ledger(
    leases: Sequence[Any], job: Job, older: int, now: datetime, links: Links, *, may_see: bool
) -> dict[str, Any]:
    """Return the verdict and the timeline, for those who may view leases."""
    if not sight.may_view(links.request, links.site, Lease):
        return {"may_see_leases": False}
    return {
        "may_see_leases": True,
        "verdict": formatting.verdict_badge(ledger.verdict_on(job, leases, older), short=False),
        "because": ledger.explain_verdict(leases),
        "attempts": [_attempt(each, now, links, may_see=may_see) for each in reversed(leases)],
        "older_attempts": ledger.counted(older) if older else "",
    }


def _attempt(lease: Any, now: datetime, links: Links, *, may_see: bool) -> dict[str, Any]:
    """Return one lease as an entry of the timeline."""
    worker, address = formatting.worker(lease), ""
    if lease.shown_worker is not None:
        worker, address = str(lease.shown_worker), links.worker(lease.worker_id)
    return {
        "lease": lease,
        "badge": formatting.outcome_badge(lease.outcome),
        "worker": worker,
        "worker_address": address,
        "token": formatting.token(lease.token),
        "granted": formatting.moment(lease.acquired_at),
        "renewed": lease.renewed_at and formatting.moment(lease.renewed_at),
        "expires": formatting.moment(lease.expires_at),
        "ended": lease.ended_at and formatting.moment(lease.ended_at),
        "lasted": formatting.ran(lease, now),
        "refused": lease.refused_at and formatting.late_return(lease),
        "refused_at": lease.refused_at and formatting.moment(lease.refused_at),
        "traceback": texts.traceback(lease, may_see=may_see),
    }


def _facts(
    job: Job, leases: Sequence[Lease], queue: Queue | None, now: datetime, *, may_see: bool
) -> list[Fact]:
    """Return the facts on top of the page: queue, attempts, priority, and times."""
    charged = _("%(used)s of %(max)s, %(all)s in all") % {
        "used": job.attempt - job.attempt_base,
        "max": job.max_attempts,
        "all": job.attempt,
    }
    is_paused = queue is not None and queue.paused_at is not None
    facts = [
        Fact(
            _("Queue"), _("%(queue)s (paused)") % {"queue": job.queue} if is_paused else job.queue
        ),
        Fact(_("Attempts"), charged),
        Fact(_("Priority"), _priority(job, queue, now)),
        Fact(_("Created"), formatting.moment(job.created_at)),
    ]
    if job.state in {State.SCHEDULED, State.RETRYING}:
        name = _("Next attempt") if job.state == State.RETRYING else _("Due")
        facts.append(Fact(name, formatting.due(job.available_at, now)))
    elif job.state == State.READY:
        facts.append(Fact(_("Waiting"), formatting.when(job, now)))
    if job.started_at is not None:
        facts.append(Fact(_("First started"), formatting.moment(job.started_at)))
    if leases:
        facts.append(Fact(_("Last attempt took"), formatting.ran(leases[-1], now)))
    if job.finished_at is not None:
        facts.append(Fact(_("Finished"), formatting.moment(job.finished_at)))
    if job.idempotency_key is not None:
        key = job.idempotency_key if may_see else texts.hidden()
        facts.append(Fact(_("Idempotency key"), key))
    return facts


def _priority(job: Job, queue: Queue | None, now: datetime) -> str:
    if job.state != State.READY or queue is None or queue.aging_seconds is None:
        return str(job.priority)
    grown = effective_priority(job.priority, job.available_at, queue.aging_seconds, now)
    return _("%(set)s, grown to %(now).1f by waiting") % {"set": job.priority, "now": grown}


def _options(job: Job) -> list[Fact]:
    fields = {field.name: field.verbose_name for field in Job._meta.concrete_fields}
    names = (
        "backend",
        "timeout_seconds",
        "lease_seconds",
        "backoff_base_seconds",
        "backoff_max_seconds",
        "backoff_jitter",
        "losses",
        "checksum",
    )
    values = {name: getattr(job, name) for name in names}
    return [
        Fact(fields[name], duration(value) if name.endswith("_seconds") else value)
        for name, value in values.items()
    ]


def _path(job: Job, leases: Sequence[Lease]) -> dict[str, Any]:
    path = taken(job, leases)
    shown = path[-STEPS_SHOWN:]
    return {
        "nodes": [
            Node(each.value, str(each.label), x, y, each in path, each == job.state)
            for each, (x, y) in _PLACES.items()
        ],
        "edges": edges(path),
        "steps": [state.label for state in shown],
        "left_out": len(path) - len(shown),
        "half_width": WIDTH // 2,
        "half_height": HEIGHT // 2,
        "width": WIDTH,
        "height": HEIGHT,
    }


def _related(seen: QuerySet[Job], job: Job, now: datetime, *, by_key: bool) -> list[dict[str, Any]]:
    """Return the last jobs of the same task and queue, and those of other queues with its key.

    ``seen`` are the jobs that the viewer may see; ``by_key`` says whether they may see keys.
    """
    jobs = seen.defer("payload", "result").exclude(pk=job.pk)
    same = jobs.filter(queue=job.queue, task=job.task).order_by("-created_at", "-id")
    found = [(each, _("same task")) for each in same[:MOST_RELATED]]
    if by_key and job.idempotency_key is not None:
        found += [(each, _("same key")) for each in _of_key(jobs, job)]
    return [
        {
            "job": each,
            "why": why,
            "state": formatting.state_badge(each.state),
            "age": formatting.when(each, now),
        }
        for each, why in found
    ]


def _of_key(jobs: QuerySet[Job], job: Job) -> QuerySet[Job]:
    """Find the jobs of a key in each queue: the index of keys begins with the queue."""
    queues = sight.whole(Queue).values_list("name", flat=True)[:100]
    key = Q(idempotency_key=job.idempotency_key)
    return jobs.filter(key, queue__in=list(queues)).order_by("-id")[:MOST_RELATED]


def taken(job: Job, leases: Sequence[Lease]) -> list[State]:
    """Return the states of a job, oldest first, from all its leases in the order of id.

    A state that leaves no trace, such as the wait for its first due time, is missing.
    """
    path: list[State] = []
    if not leases and job.state == State.SCHEDULED:
        return [State.SCHEDULED]
    _append(path, State.READY)
    for place, lease in enumerate(leases):
        _append(path, State.READY)
        _append(path, State.RUNNING)
        if lease.outcome is None:
            continue
        is_last = place == len(leases) - 1
        _append(
            path, _after_last(job, lease) if is_last else _AFTER.get(lease.outcome, State.READY)
        )
    if job.state in State.values:
        _append(path, State(job.state))
    return path


def _after_last(job: Job, lease: Lease) -> State:
    """Return the state after the newest attempt: that of the job, unless it has changed since."""
    usual = _AFTER.get(lease.outcome or "", State.READY)
    if lease.outcome in _CHARGED_ENDS:
        if job.state in {State.DEAD, State.RETRYING}:
            return State(job.state)
        if job.attempt == job.attempt_base:  # requeued: it had been dead
            return State.DEAD
    return usual


def _append(path: list[State], state: State) -> None:
    """Append a state, and before it the state between if no transition leads to it directly."""
    if path and path[-1] == state:
        return
    if path and state not in TRANSITIONS[path[-1]]:
        between = next(
            (s for s in State if s in TRANSITIONS[path[-1]] and state in TRANSITIONS[s]), None
        )
        if between is not None:
            path.append(between)
    path.append(state)


class Node(NamedTuple):
    """A state in the picture: its place, and whether the job has been or is in it."""

    state: str
    label: str
    x: int
    y: int
    been: bool
    here: bool


class Edge(NamedTuple):
    """A transition in the picture: its line, and how often the job took it."""

    path: str
    times: int


WIDTH: Final = 106
HEIGHT: Final = 30
_PLACES: Final[dict[State, tuple[int, int]]] = {
    State.SCHEDULED: (150, 35),
    State.READY: (150, 115),
    State.RUNNING: (370, 115),
    State.RETRYING: (260, 195),
    State.SUCCEEDED: (590, 35),
    State.DEAD: (590, 115),
    State.CANCELLED: (590, 195),
}
_ALWAYS: Final[dict[tuple[State, State], str]] = {
    (State.SCHEDULED, State.READY): "M150 50V97",
    (State.READY, State.RUNNING): "M203 115H314",
    (State.RUNNING, State.SUCCEEDED): "M423 107C480 95 480 40 534 36",
    (State.RUNNING, State.DEAD): "M423 115H534",
    (State.RUNNING, State.CANCELLED): "M423 123C480 135 480 190 534 194",
    (State.RUNNING, State.RETRYING): "M360 130C350 165 340 185 316 191",
    (State.RETRYING, State.READY): "M207 191C180 185 168 165 161 133",
}
_WHEN_TAKEN: Final[dict[tuple[State, State], str]] = {
    (State.RUNNING, State.READY): "M330 100C300 78 225 78 192 97",
    (State.RUNNING, State.SCHEDULED): "M370 100C365 55 290 36 207 35",
    (State.READY, State.CANCELLED): "M130 130C120 245 420 250 534 204",
    (State.READY, State.DEAD): "M190 100C260 60 460 65 534 107",
    (State.DEAD, State.READY): "M560 130C500 232 180 238 141 133",
    (State.CANCELLED, State.READY): "M565 210C480 252 150 250 135 133",
    (State.SCHEDULED, State.CANCELLED): "M97 35C20 80 60 262 552 213",
    (State.RETRYING, State.CANCELLED): "M313 197H534",
}


def edges(path: Sequence[State]) -> list[Edge]:
    """Return the transitions of the picture; those that the job took come last, on top."""
    steps = list(pairwise(path))
    times = {step: steps.count(step) for step in set(steps)}
    drawn = [Edge(line, times.get(step, 0)) for step, line in _ALWAYS.items()]
    drawn += [Edge(line, times[step]) for step, line in _WHEN_TAKEN.items() if step in times]
    return sorted(drawn, key=lambda edge: edge.times > 0)
