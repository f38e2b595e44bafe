"""Everything that matches a filter: counted up to a limit, and bounded by the newest id.

The list itself applies its filter, so the jobs of the action are those that the list shows.
A job that is enqueued after the question has a larger id and stays as it is.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.contrib.admin.exceptions import NotRegistered
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.sites import AdminSite, all_sites
from django.contrib.auth import get_user_model
from django.core.exceptions import SuspiciousOperation
from django.db import DatabaseError
from django.db.models import QuerySet
from django.http import HttpRequest, QueryDict
from django.urls import NoReverseMatch, Resolver404, resolve, reverse
from django.utils import timezone, translation

from relay_queue import conf
from relay_queue.admin import sight
from relay_queue.admin.actions.catalogue import JobAction
from relay_queue.admin.actions.perform import record
from relay_queue.exceptions import RelayError
from relay_queue.models import BulkAct, Job
from relay_queue.store import NewBulkAct
from relay_queue.store.operate import BATCH

MOST_COUNTED: Final = 100_000
"""Rows that are counted for a question. Beyond, the question says that there are more."""

PAGE: Final = ("p", "at", "all", "o", "e")
"""Parameters of a list that choose a page, an order or a display, but no rows."""


class Stopped(RelayError):
    """A bulk act cannot begin or go on; the text says why."""


def newest_id() -> int:
    """Return the id of the newest job."""
    newest = Job.objects.using(conf.get().database).order_by("-pk").values_list("pk", flat=True)
    return newest.first() or 0


def targets(rows: QuerySet[Any], action: JobAction, upper_id: int, above: int = 0) -> QuerySet[Any]:
    """Return the ids of the rows that the action can change, up to a newest id, in order."""
    rows = rows.filter(state__in=action.states, pk__gt=above, pk__lte=upper_id)
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
    found = BulkAct.objects.using(conf.get().database).filter(nonce=nonce)
    return found.values_list("pk", flat=True).first()


def record_progress(
    user_id: Any, bulk: BulkAct, progress: str, details: dict[str, Any] | None = None
) -> None:
    """Write into the log of an operator how a bulk act goes on. Call it in the transaction."""
    record(user_id, BulkAct, [(bulk.pk, str(bulk), f"progress to {progress}")], bulk.act, details)


def filters_of(request: HttpRequest) -> str:
    """Return the filters of the list that a request is for, as a query string."""
    query = request.GET.copy()
    for name in PAGE:
        query.pop(name, None)
    return query.urlencode()


def zone_and_language() -> tuple[str, str]:
    """Return the time zone and the language in which this person's dates are read."""
    return timezone.get_current_timezone_name(), translation.get_language() or ""


@contextmanager
def as_asked(bulk: BulkAct | NewBulkAct) -> Iterator[None]:
    """Read dates in the time zone and language of the person who typed them."""
    try:
        zone = zoneinfo.ZoneInfo(bulk.time_zone)
    except (KeyError, ValueError):
        raise Stopped(f"there is no time zone {bulk.time_zone!r} here") from None
    with timezone.override(zone), translation.override(bulk.language or None):
        yield


def rows_of(bulk: BulkAct | NewBulkAct, action: JobAction) -> QuerySet[Any]:
    """Return the rows that match the filter of a bulk act, as the list shows them to its operator.

    The person, their permissions and the rows of the site are read again. The request has the
    user and the filter and nothing else. Raises `Stopped` if the action is not allowed any more, if
    the site, list or filter is gone, or if the site needs more of a request.
    """
    user = get_user_model()._default_manager.filter(pk=bulk.user_id).first()
    if user is None:
        raise _not_allowed(bulk)
    request = HttpRequest()
    request.method, request.user = "GET", user
    request.GET = QueryDict(bulk.filters)
    try:
        page = _page(bulk)
        _require_allowed(bulk, page, request, action)
        with as_asked(bulk):
            return _listed(page, request)
    except Stopped:
        raise
    except (IncorrectLookupParameters, SuspiciousOperation) as refusal:
        # Without the filter and its words: they may quote what a viewer may not see.
        raise Stopped(f"the list refuses the filter ({type(refusal).__name__})") from refusal
    except DatabaseError:
        raise  # not the fault of the site: the job is retried
    except Exception as error:
        # Code of the project may need a browser's request, which a worker does not have.
        what = type(error).__name__  # its text may quote the filter
        raise Stopped(f"admin site {bulk.site!r} cannot list jobs in a worker: {what}") from error


def require_repeatable(
    new: NewBulkAct, action: JobAction, shown: QuerySet[Any], site: AdminSite
) -> None:
    """Check that a worker will list the rows ``shown`` in a request, and at the same ``site``.

    Raises `Stopped` if not. A site may list by more than the user, such as the address of a tenant,
    which a worker does not know.
    """
    if site_named(new.site) is not site:
        raise Stopped(f"another admin site has the name {new.site!r}, too. Give each its own.")
    found = targets(rows_of(new, action), action, new.upper_id)
    if sight.is_limited(found, targets(shown, action, new.upper_id)):
        raise Stopped(
            f"admin site {new.site!r} lists other jobs in a worker, which has no browser's "
            f"request, than here. Narrow the filter to at most {BATCH:,} jobs, which are done at once."
        )


def site_named(name: str) -> AdminSite | None:
    """Return the admin site of a name; None if there is none, or if several are possible.

    Sites may share a name, such as Django's own and one of the project that replaces it. Then the
    one that the addresses of the project lead to is returned.
    """
    # The module of the addresses creates the sites, and a worker may not have imported it yet.
    import_module(settings.ROOT_URLCONF)
    found = [site for site in all_sites if site.name == name]
    if len(found) == 1:
        return found[0]
    served = _served(name)
    return served if served in found else None


def _served(name: str) -> AdminSite | None:
    try:
        view = resolve(reverse(f"{name}:index")).func
    except (NoReverseMatch, Resolver404):
        return None
    return getattr(view, "admin_site", None)


def _page(bulk: BulkAct | NewBulkAct) -> Any:
    site = site_named(bulk.site)
    if site is None:
        raise Stopped(f"there is no admin site {bulk.site!r} any more, or more than one")
    try:
        return site.get_model_admin(apps.get_model(bulk.listing))
    except (LookupError, ValueError, NotRegistered):
        raise Stopped(f"the admin has no list {bulk.listing!r} any more") from None


def _require_allowed(
    bulk: BulkAct | NewBulkAct, page: Any, request: HttpRequest, action: JobAction
) -> None:
    # At one of Django's own sites this asks for an active member of the staff.
    if not page.admin_site.has_permission(request) or not page.may_perform(request, action):
        raise _not_allowed(bulk)
    if not page.has_view_permission(request):
        raise Stopped(f"{bulk.username} may not view this any more")


def _listed(page: Any, request: HttpRequest) -> QuerySet[Any]:
    listed = page.get_changelist_instance(request)
    if getattr(listed, "fault", ""):
        raise Stopped("the list refuses the search")
    rows: QuerySet[Any] = listed.get_queryset(request)
    return rows


def _not_allowed(bulk: BulkAct | NewBulkAct) -> Stopped:
    return Stopped(f"{bulk.username} may not do this any more")
