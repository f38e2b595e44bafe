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
from django.contrib import admin
from django.contrib.admin.exceptions import NotRegistered
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import SuspiciousOperation
from django.db.models import QuerySet
from django.http import HttpRequest, QueryDict
from django.utils import timezone, translation

from relay_queue import conf
from relay_queue.admin.acts.catalogue import JobAct
from relay_queue.models import BulkAct, Job

MOST_COUNTED: Final = 100_000
"""Rows that are counted before a question is asked; beyond, it says that there are more."""

PAGE: Final = ("p", "at", "all", "o", "e")
"""Parameters of a list that choose what is shown of it and not what is in it."""


class Stopped(Exception):
    """A bulk act cannot go on; the text says why."""


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
def as_asked(bulk: BulkAct) -> Iterator[None]:
    """Read dates as for the person who typed them."""
    try:
        zone = zoneinfo.ZoneInfo(bulk.time_zone)
    except (KeyError, ValueError):
        raise Stopped(f"there is no time zone {bulk.time_zone!r} here") from None
    with timezone.override(zone), translation.override(bulk.language or None):
        yield


def rows_of(bulk: BulkAct, user: Any) -> QuerySet[Any]:
    """Return the rows that match the filter of a bulk act, as its list shows them to ``user``.

    Raises `Stopped` if there is no such list, or no such filter, any more.
    """
    request = HttpRequest()
    request.method, request.user = "GET", user
    request.GET = QueryDict(bulk.filters)
    try:
        page: Any = admin.site.get_model_admin(apps.get_model(bulk.listing))
    except (LookupError, NotRegistered):
        raise Stopped(f"the admin has no list {bulk.listing!r} any more") from None
    if not page.has_view_permission(request):
        raise Stopped(f"{bulk.username} may not view this any more")
    try:
        with as_asked(bulk):
            rows: QuerySet[Any] = page.get_changelist_instance(request).get_queryset(request)
    except (IncorrectLookupParameters, SuspiciousOperation) as refusal:
        raise Stopped(f"the list refuses the filter {bulk.filters!r}: {refusal}") from refusal
    return rows
