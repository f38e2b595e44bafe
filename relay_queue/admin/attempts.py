"""Leases as rows of a table on the page of who had them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import QuerySet
from django.utils.safestring import SafeString

from relay_queue import conf
from relay_queue.admin import badges, cells
from relay_queue.admin.dashboard.links import Links, linked
from relay_queue.models import Lease


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


def read(pks: Sequence[int]) -> list[Lease]:
    """Return leases with their jobs, but for what may be large, in the order of their ids given."""
    found = leases().in_bulk(pks)
    return [found[pk] for pk in pks if pk in found]


def leases() -> QuerySet[Lease]:
    """Return all leases with their jobs, but for what may be large."""
    rows = Lease.objects.using(conf.get().database).select_related("job")
    return rows.defer("traceback", "job__payload", "job__result")


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
