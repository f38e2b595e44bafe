"""What the page of one job shows, read with the same few statements for every job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.contrib.admin.utils import quote
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.admin import badges, cells, words
from relay_queue.admin.facts import Fact
from relay_queue.admin.jobpage import payloads, way
from relay_queue.models import Job, Lease, Queue
from relay_queue.ranking import effective_priority
from relay_queue.states import State
from relay_queue.store import report
from relay_queue.verdict import judge

VIEW_PAYLOAD: Final = "relay_queue.view_payload"
MOST_ATTEMPTS: Final = 100
MOST_RELATED: Final = 5
WAY_SHOWN: Final = 24


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


def context(request: HttpRequest, job: Job, site: str) -> dict[str, Any]:
    """Return what the template of the page needs."""
    alias = conf.get().database
    now = cells.now()
    leases = list(
        Lease.objects.using(alias).filter(job=job.pk).select_related("worker").order_by("id")
    )
    queue = Queue.objects.using(alias).filter(pk=job.queue).first()
    may_see = request.user.has_perm(VIEW_PAYLOAD)
    return {
        "job": job,
        "state": badges.state_badge(job.state),
        "facts": _facts(job, leases, queue, now),
        "way": _way(job, leases),
        "options": _options(job),
        "may_see_payload": may_see,
        "arguments": payloads.arguments(job.task, job.payload) if may_see else "",
        "result": payloads.result(job.task, job.result) if may_see else "",
        "related": _related(job, alias, now),
        **_ledger(request, leases, now, site),
    }


def _ledger(
    request: HttpRequest, leases: Sequence[Lease], now: datetime, site: str
) -> dict[str, Any]:
    """Return the verdict and the timeline, for those who may view leases."""
    if not request.user.has_perm("relay_queue.view_lease"):
        return {"may_see_leases": False}
    shown = leases[-MOST_ATTEMPTS:][::-1]
    may_see_workers = request.user.has_perm("relay_queue.view_worker")
    return {
        "may_see_leases": True,
        "verdict": cells.verdict_badge(judge(leases), short=False),
        "because": report.told(shown[::-1]),
        "attempts": [_attempt(lease, now, site if may_see_workers else "") for lease in shown],
        "attempts_in_all": len(leases),
    }


def _attempt(lease: Lease, now: datetime, site: str) -> Attempt:
    refused = None
    if lease.refused_at is not None:
        text = f"{lease.refused_verb}: {lease.refused_reason}"
        refused = badges.badge("refused", text, badges.WARNING)
    worker, address = "–", ""
    if lease.worker_id is not None:
        worker = str(lease.worker) if lease.worker else f"#{lease.worker_id}"
        address = _address(site, "worker", lease.worker_id) if lease.worker and site else ""
    return Attempt(
        lease=lease,
        badge=badges.outcome_badge(lease.outcome),
        worker=worker,
        worker_address=address,
        token=cells.token(lease.token),
        granted=words.moment(lease.acquired_at),
        renewed=_moment(lease.renewed_at),
        expires=words.moment(lease.expires_at),
        ended=_moment(lease.ended_at),
        lasted=cells.ran(lease, now),
        refused=refused,
        refused_at=_moment(lease.refused_at),
    )


def _moment(when: datetime | None) -> SafeString | None:
    return None if when is None else words.moment(when)


def _facts(job: Job, leases: Sequence[Lease], queue: Queue | None, now: datetime) -> list[Fact]:
    """Return what is asked first of a job: where, how often, how urgent, since when, what next."""
    charged = _("%(used)s of %(max)s, %(all)s in all") % {
        "used": job.attempt - job.attempt_base,
        "max": job.max_attempts,
        "all": job.attempt,
    }
    facts = [
        Fact(_("Queue"), _queue(job, queue)),
        Fact(_("Attempts"), charged),
        Fact(_("Priority"), _priority(job, queue, now)),
        Fact(_("Created"), words.moment(job.created_at)),
    ]
    if job.state in {State.SCHEDULED, State.RETRYING}:
        name = _("Next attempt") if job.state == State.RETRYING else _("Due")
        facts.append(Fact(name, cells.due(job.available_at, now)))
    elif job.state == State.READY:
        facts.append(Fact(_("Waiting"), cells.when(job, now)))
    if job.started_at is not None:
        facts.append(Fact(_("First started"), words.moment(job.started_at)))
    if leases:
        facts.append(Fact(_("Last attempt took"), cells.ran(leases[-1], now)))
    if job.finished_at is not None:
        facts.append(Fact(_("Finished"), words.moment(job.finished_at)))
    if job.idempotency_key is not None:
        facts.append(Fact(_("Idempotency key"), job.idempotency_key))
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
            value = words.duration(value)
        shown.append(Fact(fields[name], value))
    return shown


def _way(job: Job, leases: Sequence[Lease]) -> dict[str, Any]:
    taken = way.taken(job, leases)
    shown = taken[-WAY_SHOWN:]
    return {
        "nodes": list(way.nodes(taken, job.state)),
        "edges": way.edges(taken),
        "steps": [state.label for state in shown],
        "left_out": len(taken) - len(shown),
        "half_width": way.WIDTH // 2,
        "half_height": way.HEIGHT // 2,
        "width": way.WIDTH,
        "height": way.HEIGHT,
    }


def _related(job: Job, alias: str, now: datetime) -> list[dict[str, Any]]:
    """Return the last jobs of the same task and queue, and those of other queues with its key."""
    jobs = Job.objects.using(alias).defer("payload", "result").exclude(pk=job.pk)
    same = jobs.filter(queue=job.queue, task=job.task).order_by("-created_at", "-id")
    found = [(each, _("same task")) for each in same[:MOST_RELATED]]
    if job.idempotency_key is not None:
        found += [(each, _("same key")) for each in _of_key(jobs, job, alias)]
    return [
        {
            "job": each,
            "why": why,
            "state": badges.state_badge(each.state),
            "age": cells.when(each, now),
        }
        for each, why in found
    ]


def _of_key(jobs: QuerySet[Job], job: Job, alias: str) -> QuerySet[Job]:
    """Find the key in every queue: the index of keys begins with the queue."""
    queues = Queue.objects.using(alias).values_list("name", flat=True)[:100]
    key = Q(idempotency_key=job.idempotency_key)
    return jobs.filter(key, queue__in=list(queues)).order_by("-id")[:MOST_RELATED]


def _address(site: str, model: str, key: Any) -> str:
    try:
        return reverse(f"{site}:relay_queue_{model}_change", args=[quote(key)])
    except NoReverseMatch:  # a site of the project's own may show fewer pages
        return ""
