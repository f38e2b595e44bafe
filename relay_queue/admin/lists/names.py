"""The names of queues and tasks that a page offers, read once for a request."""

from __future__ import annotations

from typing import Any, Final

from django.contrib.admin import AdminSite
from django.http import HttpRequest

from relay_queue.admin import sight
from relay_queue.query import lists
from relay_queue.query.lists import Names

_KEPT_AS: Final = "_relay_names"
_SHOWN_AS: Final = "_relay_names_shown"


def of(request: HttpRequest) -> Names:
    """Return all names."""
    kept: Any = getattr(request, _KEPT_AS, None)
    if kept is None:
        kept = lists.read_names()
        setattr(request, _KEPT_AS, kept)
    return kept  # type: ignore[no-any-return]


def shown(request: HttpRequest, site: AdminSite) -> Names:
    """Return the names to offer to a viewer: those of jobs that they may see at a site.

    A plan of a list needs those of `of`: it finds nothing in a queue whose name is missing.
    """
    kept: Any = getattr(request, _SHOWN_AS, None)
    if kept is None:
        kept = of(request)
        if sight.limits_jobs(request, site):
            kept = lists.names_among(kept, sight.jobs(request, site))
        setattr(request, _SHOWN_AS, kept)
    return kept  # type: ignore[no-any-return]
