"""Performing an action: one transaction with its audit, and the messages to the operator.

The audit is an entry in the admin's own log for everything that an operator did. The log is in the
database of the users, which may be another one than the queue's. In one database the entry commits
with the action; in two, the entry is written right after the commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from django.contrib import messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import OperationalError, connections, router, transaction
from django.db.models import Model
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from relay_queue import conf, store
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
        record(user_id, model, changed, action.name, given, deletes=action.deletes)
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


def record(
    user_id: Any,
    model: type[Model],
    rows: Sequence[tuple[Any, str, str]],
    action: str,
    details: dict[str, Any] | None = None,
    *,
    deletes: bool = False,
) -> None:
    """Write one entry for each row: its key, its name, and what changed.

    Call it in the transaction of the action. ``details`` are kept for programs to read.
    """
    if not rows:
        return
    name = str(model._meta.verbose_name)
    entries = [
        LogEntry(
            user_id=user_id,
            object_id=str(key),
            object_repr=called[:200],
            action_flag=DELETION if deletes else CHANGE,
            change_message=_message(action, change, (name, called) if deletes else None, details),
        )
        for key, called, change in rows
    ]
    write = partial(_write, model, entries)
    queue_database = conf.get().database
    if router.db_for_write(LogEntry) == queue_database:
        write()
    else:
        # Not before the commit: a rolled back action must leave no entry. Not inside of it either:
        # a transaction that holds the writer of one database must not wait for another's.
        transaction.on_commit(write, using=queue_database, robust=True)


def _write(model: type[Model], entries: Sequence[LogEntry]) -> None:
    content_type = ContentType.objects.get_for_model(model)
    for entry in entries:
        entry.content_type_id = content_type.pk
    LogEntry.objects.bulk_create(entries)


def _message(
    action: str, change: str, deleted: tuple[str, str] | None, details: dict[str, Any] | None
) -> str:
    """Return JSON that the admin's history can show, with the details for programs beside it."""
    shown: dict[str, Any] = {"relay": {"act": action, **(details or {})}}
    if deleted is None:
        shown["changed"] = {"fields": [f"{change} ({action})"]}
    else:
        shown["deleted"] = {"name": deleted[0], "object": deleted[1]}
    return json.dumps([shown])
