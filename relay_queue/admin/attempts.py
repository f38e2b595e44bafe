"""Leases as rows of a table on the page of who had them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib.admin import AdminSite
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from relay_queue.admin import badges, cells, sight
from relay_queue.admin.dashboard.links import Links, linked
from relay_queue.models import Lease, Worker


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One lease: its job, its end, and how long it took or has taken."""

    job: SafeString
    task: SafeString
    queue: SafeString
    attempt: int
    outcome: SafeString
    lasted: SafeString
    ended: SafeString
    expires: SafeString
    error: SafeString


def read(found: QuerySet[Lease], pks: Sequence[int]) -> list[Lease]:
    """Return leases among those ``found``, in the order of their ids given."""
    by_id = found.in_bulk(pks)
    return [by_id[pk] for pk in pks if pk in by_id]


def leases(request: HttpRequest, site: AdminSite) -> QuerySet[Lease]:
    """Return the leases that a viewer may see, with their jobs, but for what may be large."""
    rows = sight.leases(request, site).select_related("job")
    return rows.defer("traceback", "job__payload", "job__result")


def name_workers(request: HttpRequest, site: AdminSite, found: Iterable[Any]) -> None:
    """Give each lease its worker as ``shown_worker``: None where the viewer may not see that."""
    found = list(found)
    workers: dict[int, Worker] = {}
    if sight.may_view(request, site, Worker):
        # Zero is no worker: with it, a page costs the same statements whatever it shows.
        ids = {lease.worker_id or 0 for lease in found} | {0}
        workers = sight.rows(request, site, Worker).in_bulk(ids)
    for lease in found:
        lease.shown_worker = workers.get(lease.worker_id)


def rows(found: Sequence[Lease], now: datetime, links: Links) -> list[AttemptRow]:
    """Return what a table shows of leases."""
    return [_row(lease, now, links) for lease in found]


def _row(lease: Any, now: datetime, links: Links) -> AttemptRow:
    return AttemptRow(
        job=linked(lease.job_id, links.job(lease.job_id)),
        task=cells.task(lease.job),
        queue=linked(lease.job.queue, links.queue(lease.job.queue)),
        attempt=lease.attempt,
        outcome=badges.outcome_badge(lease.outcome),
        lasted=cells.ran(lease, now),
        ended=cells.ago(lease.ended_at, now),
        expires=cells.due(lease.expires_at, now),
        error=cells.error(lease.error),
    )
