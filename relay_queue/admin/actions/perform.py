"""Performing an action: one transaction with its audit, and the messages to the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from django.contrib import messages
from django.db import OperationalError, connections
from django.db.models import Model
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from relay_queue import conf, store
from relay_queue.admin.actions import audit
from relay_queue.admin.actions.catalogue import Action, Done
from relay_queue.exceptions import RelayError
from relay_queue.store.dialects import dialect_for

T = TypeVar("T")

MOST_NAMED: Final = 5
"""Rows that are named in a message each."""


def perform(
    action: Action, user_id: Any, model: type[Model], keys: Sequence[Any], given: dict[str, Any]
) -> Done:
    """Perform an action on at most `BATCH` rows, and write the audit.

    Keys that are not changed, skipped or left are not there. Raises what the store raises; nothing
    is changed then.
    """
    database = conf.get().database
    with store.transaction() as tx:
        # Read first: the action may delete the rows. Without payloads, which may be large.
        rows = model._default_manager.using(database).defer(*action.heavy)
        called = {row.pk: str(row) for row in rows.filter(pk__in=keys)}
        done = action.verb(tx, [key for key in keys if key in called], given)
        changed = [(key, called[key], change) for key, change in done.changed.items()]
        audit.record(user_id, model, changed, action.name, given, deletes=action.deletes)
    return done


def attempt(request: HttpRequest, what: Callable[[], T]) -> T | None:
    """Return what a call of the store returns; after a refusal, report it and return None."""
    try:
        return what()
    except RelayError as refusal:
        messages.error(request, _("Nothing was changed: %s") % refusal)
    except OperationalError as error:
        if dialect_for(connections[conf.get().database]).diagnose(error) != "busy":
            raise
        messages.error(request, _("Nothing was changed: the database is busy. Try again."))
    return None


def report_result(
    request: HttpRequest, action: Action, model: type[Model], keys: Sequence[Any], done: Done
) -> None:
    """Report in messages which rows changed, which were skipped and why, and which are missing."""
    opts = model._meta
    names = {"act": action.label, "one": opts.verbose_name, "many": opts.verbose_name_plural}
    if done.changed:
        n = len(done.changed)
        text = ngettext("%(act)s: done for 1 %(one)s.", "%(act)s: done for %(n)s %(many)s.", n)
        messages.success(request, text % {**names, "n": f"{n:,}"})
    missing = [key for key in keys if key not in done.changed and key not in done.skipped]
    left = {**done.skipped, **dict.fromkeys(missing, _("It is not there any more."))}
    for key in list(left)[:MOST_NAMED]:
        text = _("%(act)s: nothing was done to %(one)s %(key)s. %(why)s")
        messages.warning(request, text % {**names, "key": key, "why": left[key]})
    if len(left) > MOST_NAMED:
        text = _("%(act)s: nothing was done to %(n)s more, for the like reasons.")
        messages.warning(request, text % {**names, "n": f"{len(left) - MOST_NAMED:,}"})
