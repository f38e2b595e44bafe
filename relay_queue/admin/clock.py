"""The time to which a page counts: the database's, which leases follow, read once for a request."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from django.http import HttpRequest

from relay_queue.query import looks

_KEPT_AS: Final = "_relay_now"


def now(request: HttpRequest) -> datetime:
    """Return the time by the database's clock; a second call for a request returns the same."""
    kept: Any = getattr(request, _KEPT_AS, None)
    if kept is None:
        kept = looks.now()
        setattr(request, _KEPT_AS, kept)
    return kept  # type: ignore[no-any-return]
