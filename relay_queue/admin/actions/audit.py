"""The audit: an entry in the admin's own log for everything that an operator did.

The log is in the database of the users, which may be another one than the queue's. In one database
the entry commits with the action; in two, the entry is written right after the commit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import router, transaction
from django.db.models import Model

from relay_queue import conf


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
