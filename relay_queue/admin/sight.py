"""Sight: which rows a viewer may see at one admin site, which parts of them, and at which time.

A project limits a site by ``get_queryset`` and the permissions of the pages that it registers
there. Pages that show rows of another table ask this module, so that one limit holds on every page.
What several parts of a page need is read once for a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Final, TypeVar

from django.contrib.admin import AdminSite
from django.contrib.admin.exceptions import NotRegistered
from django.core.exceptions import EmptyResultSet
from django.db.models import Exists, Model, OuterRef, QuerySet
from django.http import HttpRequest

from relay_queue import conf
from relay_queue.models import Job, Lease, Worker
from relay_queue.query import lists, looks
from relay_queue.query.lists import Names

APP: Final = Job._meta.app_label
T = TypeVar("T")


def page_of(site: AdminSite, model: type[Model]) -> Any | None:
    """Return the page that a site has for a table; None if it has none."""
    try:
        return site.get_model_admin(model)
    except NotRegistered:
        return None


def may_view(request: HttpRequest, site: AdminSite, model: type[Model]) -> bool:
    """Say whether a viewer may view rows of a table: its page at the site decides."""
    page = page_of(site, model)
    if page is None:
        return bool(request.user.has_perm(f"{APP}.view_{model._meta.model_name}"))
    return bool(page.has_view_permission(request))


def may_view_payload(request: HttpRequest, site: AdminSite) -> bool:
    """Say whether a viewer may view the texts that callers and functions put into jobs.

    These are arguments, results, messages and tracebacks of errors, and idempotency keys. The page
    of jobs at the site decides.
    """
    ask = getattr(page_of(site, Job), "has_view_payload_permission", None)
    return has_view_payload(request) if ask is None else bool(ask(request))


def has_view_payload(request: HttpRequest) -> bool:
    """Say whether a viewer has the permission ``view_payload``."""
    return bool(request.user.has_perm(f"{APP}.view_payload"))


def whole(model: type[Model]) -> QuerySet[Any]:
    """Return all rows of a table, from the database of the queue."""
    return model._default_manager.using(conf.get().database)


def rows(request: HttpRequest, site: AdminSite, model: type[Model]) -> QuerySet[Any]:
    """Return the rows of a table that a viewer may see; all if the site has no page for them."""
    page = page_of(site, model)
    return whole(model) if page is None else page.get_queryset(request)


def jobs(request: HttpRequest, site: AdminSite) -> QuerySet[Job]:
    """Return the jobs that a viewer may see."""
    return rows(request, site, Job)


def leases(request: HttpRequest, site: AdminSite) -> QuerySet[Lease]:
    """Return the leases that a viewer may see, of jobs that they may see."""
    page = page_of(site, Lease)
    return of_jobs(request, site, whole(Lease)) if page is None else page.get_queryset(request)


def of_jobs(
    request: HttpRequest, site: AdminSite, found: QuerySet[Any], job_id: str = "job_id"
) -> QuerySet[Any]:
    """Keep the rows whose job, by the column ``job_id``, the viewer may see."""
    seen = jobs(request, site)
    if not is_limited(seen, whole(Job)):
        return found
    return found.filter(Exists(seen.order_by().filter(pk=OuterRef(job_id))))


def name_workers(request: HttpRequest, site: AdminSite, found: Iterable[Any]) -> None:
    """Set the worker of each lease as ``shown_worker``; None where the viewer may not see it."""
    found = list(found)
    workers: dict[int, Worker] = {}
    if may_view(request, site, Worker):
        # No worker has the id 0. With it, a page takes the same statements without any lease.
        ids = {lease.worker_id or 0 for lease in found} | {0}
        workers = rows(request, site, Worker).in_bulk(ids)
    for lease in found:
        lease.shown_worker = workers.get(lease.worker_id)


def now(request: HttpRequest) -> datetime:
    """Return the time to which a page counts: the database's, which leases follow."""
    return _once(request, "_relay_now", looks.now)


def all_names(request: HttpRequest) -> Names:
    """Return the names of all queues and tasks.

    A plan of a list needs all of them: it finds nothing in a queue whose name is missing.
    """
    return _once(request, "_relay_names", lists.read_names)


def names(request: HttpRequest, site: AdminSite) -> Names:
    """Return the names to offer to a viewer: those of jobs that they may see at a site."""

    def read() -> Names:
        known = all_names(request)
        if not limits_jobs(request, site):
            return known
        return lists.names_among(known, jobs(request, site))

    return _once(request, "_relay_names_shown", read)


def _once(request: HttpRequest, name: str, read: Callable[[], T]) -> T:
    """Return what the first call for a request has read."""
    if not hasattr(request, name):
        setattr(request, name, read())
    kept: T = getattr(request, name)
    return kept


def limits_jobs(request: HttpRequest, site: AdminSite) -> bool:
    """Say whether a site keeps jobs from this viewer, so that the counters count too many."""
    return limits(request, site, Job)


def counters_tell(request: HttpRequest, site: AdminSite, model: type[Model]) -> bool:
    """Say whether a viewer may be shown the counters of the queues, or workers, that they may see.

    A counter counts every job of a queue or worker. Where a site limits the jobs alone, some of the
    counted jobs are hidden. A site that limits the queues or workers, too, shows those whole.
    """
    return not limits_jobs(request, site) or limits(request, site, model)


def limits(request: HttpRequest, site: AdminSite, model: type[Model]) -> bool:
    """Say whether a site keeps rows of a table from this viewer."""
    return is_limited(rows(request, site, model), whole(model))


def is_limited(found: QuerySet[Any], own: QuerySet[Any]) -> bool:
    """Say whether rows differ from those that Relay's own page shows.

    The statements are compared, without columns, joins for display and the order.
    """
    return _statement(found) != _statement(own)


def _statement(found: QuerySet[Any]) -> object:
    query = found.values("pk").query
    query.clear_ordering(force=True)
    try:
        return query.get_compiler(conf.get().database).as_sql()
    except EmptyResultSet:
        return None
