"""Everything that matches a filter: counted with a bound, and held fast by the newest id.

The filter is that of the list, and the list itself applies it, so what was shown is what is meant.
A job that is enqueued after the question was asked has a larger id and is left alone.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.apps import apps
from django.contrib.admin import AdminSite
from django.contrib.admin.exceptions import NotRegistered
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.auth import get_user_model
from django.core.exceptions import SuspiciousOperation
from django.db import DatabaseError
from django.db.models import QuerySet
from django.http import HttpRequest, QueryDict
from django.utils import timezone, translation

from relay_queue import conf
from relay_queue.admin import sight
from relay_queue.admin.acts import sites
from relay_queue.admin.acts.catalogue import JobAct
from relay_queue.admin.acts.doing import BATCH
from relay_queue.exceptions import RelayError
from relay_queue.models import BulkAct, Job
from relay_queue.store import NewBulkAct

MOST_COUNTED: Final = 100_000
"""Rows that are counted before a question is asked; beyond, it says that there are more."""

PAGE: Final = ("p", "at", "all", "o", "e")
"""Parameters of a list that choose what is shown of it and not what is in it."""


class Stopped(RelayError):
    """A bulk act cannot begin or go on; the text says why."""


def newest_id() -> int:
    """Return the id of the newest job."""
    newest = Job.objects.using(conf.get().database).order_by("-pk").values_list("pk", flat=True)
    return newest.first() or 0


def targets(rows: QuerySet[Any], act: JobAct, upper_id: int, above: int = 0) -> QuerySet[Any]:
    """Return the ids of the rows that the act can change, up to a newest id, in order."""
    rows = rows.filter(state__in=act.states, pk__gt=above, pk__lte=upper_id)
    return rows.order_by("pk").values_list("pk", flat=True)


def count(ids: QuerySet[Any]) -> int:
    """Count no further than one above ``MOST_COUNTED``."""
    return ids.order_by()[: MOST_COUNTED + 1].count()


def counted(ids: QuerySet[Any]) -> int | None:
    """Return how many there are; None if that is more than ``MOST_COUNTED``."""
    number = count(ids)
    return number if number <= MOST_COUNTED else None


def of_nonce(nonce: str) -> int | None:
    """Return the id of the bulk act of a nonce; None if there is none."""
    acts = BulkAct.objects.using(conf.get().database).filter(nonce=nonce)
    return acts.values_list("pk", flat=True).first()


def filters_of(request: HttpRequest) -> str:
    """Return the filters of the list that a request is for, as a query string."""
    query = request.GET.copy()
    for name in PAGE:
        query.pop(name, None)
    return query.urlencode()


def zone_and_language() -> tuple[str, str]:
    """Return in which zone and which format this person's dates are read."""
    return timezone.get_current_timezone_name(), translation.get_language() or ""


@contextmanager
def as_asked(bulk: BulkAct | NewBulkAct) -> Iterator[None]:
    """Read dates as for the person who typed them."""
    try:
        zone = zoneinfo.ZoneInfo(bulk.time_zone)
    except (KeyError, ValueError):
        raise Stopped(f"there is no time zone {bulk.time_zone!r} here") from None
    with timezone.override(zone), translation.override(bulk.language or None):
        yield


def rows_of(bulk: BulkAct | NewBulkAct, act: JobAct) -> QuerySet[Any]:
    """Return the rows that match the filter of a bulk act, as its list shows them to who wants it.

    The person, their permissions and what the site shows them are asked anew. The request has the
    user and the filter and nothing else. Raises `Stopped` if the act is not allowed any more, if
    there is no such site, list or filter any more, or if the site needs more of a request.
    """
    user = get_user_model()._default_manager.filter(pk=bulk.user_id).first()
    if user is None:
        raise _not_allowed(bulk)
    request = HttpRequest()
    request.method, request.user = "GET", user
    request.GET = QueryDict(bulk.filters)
    try:
        page = _page(bulk)
        _require_allowed(bulk, page, request, act)
        with as_asked(bulk):
            return _listed(page, request)
    except Stopped:
        raise
    except (IncorrectLookupParameters, SuspiciousOperation) as refusal:
        raise Stopped(f"the list refuses the filter {bulk.filters!r}: {refusal}") from refusal
    except DatabaseError:
        raise  # no fault of the site: the job is tried again
    except Exception as error:
        # Code of the project that wants a browser's request, say, which has no place in a worker.
        what = f"{type(error).__name__}: {error}"
        raise Stopped(f"admin site {bulk.site!r} cannot list jobs in a worker: {what}") from error


def require_repeatable(new: NewBulkAct, act: JobAct, shown: QuerySet[Any], site: AdminSite) -> None:
    """Check that a worker will list what was ``shown`` in a request, and by the same ``site``.

    Raises `Stopped` if it cannot, or if the site asks for more than the user: what it shows by
    the address of a tenant, say, a worker would not know.
    """
    if sites.named(new.site) is not site:
        raise Stopped(f"another admin site has the name {new.site!r}, too. Give each its own.")
    found = targets(rows_of(new, act), act, new.upper_id)
    if sight.is_limited(found, targets(shown, act, new.upper_id)):
        raise Stopped(
            f"admin site {new.site!r} lists other jobs in a worker, which has no browser's request, "
            f"than here. Narrow the filter to at most {BATCH:,} jobs, which are done at once."
        )


def _page(bulk: BulkAct | NewBulkAct) -> Any:
    site = sites.named(bulk.site)
    if site is None:
        raise Stopped(f"there is no admin site {bulk.site!r} any more, or more than one")
    try:
        return site.get_model_admin(apps.get_model(bulk.listing))
    except (LookupError, ValueError, NotRegistered):
        raise Stopped(f"the admin has no list {bulk.listing!r} any more") from None


def _require_allowed(
    bulk: BulkAct | NewBulkAct, page: Any, request: HttpRequest, act: JobAct
) -> None:
    # Of a site as Django makes it: active, and staff.
    if not page.admin_site.has_permission(request) or not page.may_act(request, act):
        raise _not_allowed(bulk)
    if not page.has_view_permission(request):
        raise Stopped(f"{bulk.username} may not view this any more")


def _listed(page: Any, request: HttpRequest) -> QuerySet[Any]:
    listed = page.get_changelist_instance(request)
    if fault := getattr(listed, "fault", ""):
        raise Stopped(f"the list refuses the search {listed.query!r}: {fault}")
    rows: QuerySet[Any] = listed.get_queryset(request)
    return rows


def _not_allowed(bulk: BulkAct | NewBulkAct) -> Stopped:
    return Stopped(f"{bulk.username} may not do this any more")
