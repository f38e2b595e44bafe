"""What must be right before a supervisor starts, looked at without opening a database in it."""

from __future__ import annotations

import os
from collections.abc import Callable

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections
from django.db.migrations.loader import MigrationLoader

from relay_queue.cli.base import explain

APP = "relay_queue"


def database_fault(alias: str) -> str:
    """Return why workers cannot use the database ``alias``; empty if they can.

    The look is taken by a forked child: a connection that was ever open in the supervisor could
    be closed, or worse be used, by a worker that inherits it.
    """
    return _in_child(lambda: _database_fault(alias))


def _database_fault(alias: str) -> str:
    try:
        missing = missing_migrations(alias)
    except (DatabaseError, InterfaceError, ImproperlyConfigured) as error:
        return explain(error)
    if not missing:
        return ""
    option = "" if alias == "default" else f" --database {alias}"
    return (
        f"the database {alias!r} lacks {len(missing)} of Relay's migrations "
        f"({', '.join(missing)}). Run manage.py migrate{option}."
    )


def missing_migrations(alias: str) -> list[str]:
    """Return the names of Relay's migrations that the database ``alias`` has not had."""
    loader = MigrationLoader(connections[alias])
    nodes = sorted(name for app, name in loader.graph.nodes if app == APP)
    return [name for name in nodes if (APP, name) not in loader.applied_migrations]


def _in_child(look: Callable[[], str]) -> str:
    """Return what ``look`` returns in a forked child, or that it could not be found out."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, f"={look()}".encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text.removeprefix("=") if text else "it could not be examined: the examiner died."
