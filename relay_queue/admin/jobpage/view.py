"""The content of the page of one job, read with the same few statements for every job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from relay_queue.admin import clock, formatting, sight, texts
from relay_queue.admin.formatting import Fact
from relay_queue.admin.jobpage import state_path
from relay_queue.admin.redacting import hidden
from relay_queue.models import Job, Lease, Queue
from relay_queue.quantities import duration
from relay_queue.query import ledger
from relay_queue.ranking import effective_priority
from relay_queue.states import State

MOST_RELATED: Final = 5
STEPS_SHOWN: Final = 24


@dataclass(frozen=True, slots=True)
class Attempt:
    """One lease as an entry of the timeline."""

    lease: Lease
    badge: SafeString
    worker: str
    worker_address: str
    token: str
    granted: SafeString
    renewed: SafeString | None
    expires: SafeString
    ended: SafeString | None
    lasted: SafeString
    refused: SafeString | None
    refused_at: SafeString | None
    traceback: str


def context(request: HttpRequest, job: Job, site: AdminSite) -> dict[str, Any]:
    """Return the context of the template, as far as this person may see the job at this site."""
    now = clock.now(request)
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
        **_ledger(request, job, leases, site, older=older, now=now, may_see=may_see),
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
    request: HttpRequest,
    job: Job,
    leases: Sequence[Any],
    site: AdminSite,
    *,
    older: int,
    now: datetime,
    may_see: bool,
) -> dict[str, Any]:
    """Return the verdict and the timeline, for those who may view leases."""
    if not sight.may_view(request, site, Lease):
        return {"may_see_leases": False}
    return {
        "may_see_leases": True,
        "verdict": formatting.verdict_badge(ledger.verdict_on(job, leases, older), short=False),
        "because": ledger.explain_verdict(leases),
        "attempts": [
            _attempt(lease, now, site.name, may_see=may_see) for lease in reversed(leases)
        ],
        "older_attempts": ledger.counted(older) if older else "",
    }


def _attempt(lease: Any, now: datetime, site: str, *, may_see: bool) -> Attempt:
    refused = None
    if lease.refused_at is not None:
        text = f"{lease.refused_verb}: {lease.refused_reason}"
        refused = formatting.badge("refused", text, formatting.WARNING)
    worker, address = formatting.worker(lease), ""
    if lease.shown_worker is not None:
        worker = str(lease.shown_worker)
        address = _address(site, "worker", lease.worker_id)
    return Attempt(
        lease=lease,
        badge=formatting.outcome_badge(lease.outcome),
        worker=worker,
        worker_address=address,
        token=formatting.token(lease.token),
        granted=formatting.moment(lease.acquired_at),
        renewed=_moment(lease.renewed_at),
        expires=formatting.moment(lease.expires_at),
        ended=_moment(lease.ended_at),
        lasted=formatting.ran(lease, now),
        refused=refused,
        refused_at=_moment(lease.refused_at),
        traceback=texts.traceback(lease, may_see=may_see),
    )


def _moment(when: datetime | None) -> SafeString | None:
    return None if when is None else formatting.moment(when)


def _facts(
    job: Job, leases: Sequence[Lease], queue: Queue | None, now: datetime, *, may_see: bool
) -> list[Fact]:
    """Return the facts on top of the page: queue, attempts, priority, and times."""
    charged = _("%(used)s of %(max)s, %(all)s in all") % {
        "used": job.attempt - job.attempt_base,
        "max": job.max_attempts,
        "all": job.attempt,
    }
    facts = [
        Fact(_("Queue"), _queue(job, queue)),
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
        key = job.idempotency_key if may_see else hidden()
        facts.append(Fact(_("Idempotency key"), key))
    return facts


def _queue(job: Job, queue: Queue | None) -> str:
    if queue is not None and queue.paused_at is not None:
        return _("%(queue)s (paused)") % {"queue": job.queue}
    return job.queue


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
    shown = []
    for name in names:
        value = getattr(job, name)
        if name.endswith("_seconds"):
            value = duration(value)
        shown.append(Fact(fields[name], value))
    return shown


def _path(job: Job, leases: Sequence[Lease]) -> dict[str, Any]:
    taken = state_path.taken(job, leases)
    shown = taken[-STEPS_SHOWN:]
    return {
        "nodes": list(state_path.nodes(taken, job.state)),
        "edges": state_path.edges(taken),
        "steps": [state.label for state in shown],
        "left_out": len(taken) - len(shown),
        "half_width": state_path.WIDTH // 2,
        "half_height": state_path.HEIGHT // 2,
        "width": state_path.WIDTH,
        "height": state_path.HEIGHT,
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


def _address(site: str, model: str, key: Any) -> str:
    try:
        return reverse(f"{site}:relay_queue_{model}_change", args=[quote(key)])
    except NoReverseMatch:  # a site of the project may have fewer pages
        return ""
