"""The checks before a supervisor starts; the supervisor itself opens no database for them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, Error, InterfaceError, connections
from django.db.migrations.loader import MigrationLoader

from relay_queue.cli.base import explain
from relay_queue.compat import Task
from relay_queue.logs import get_logger, printable
from relay_queue.store.dialects import dialect_for
from relay_queue.task import import_task_modules, task_packages
from relay_queue.worker.database import Outage
from relay_queue.worker.lifetime import threads_at_rest

logger = get_logger("relay_queue.supervisor")

APP = "relay_queue"
LOOK_SECONDS = 1.0
"""The pause between two tries at a database that is away."""

MOST_TASKS = 20
"""Tasks that are named at the start."""

NO_TASKS = "none found; a job that names one in another module has that imported"

FOUND, AWAY = "=", "~"


def database_fault(alias: str) -> str:
    """Return why workers cannot use the database ``alias``; empty if they can.

    Waits without a limit while the database is away or held: it may be started at the same time as
    the workers. Wrong credentials, a wrong name and missing tables are faults at once.

    A forked child examines the database. A connection that was ever open in the supervisor could
    be closed, or worse be used, by a worker that inherits it.
    """
    outage = Outage(logger)
    while True:
        answer = _in_child(lambda: _look(alias))
        if not answer.startswith(AWAY):
            outage.is_over()
            return answer.removeprefix(FOUND)
        outage.goes_on(answer.removeprefix(AWAY))
        time.sleep(LOOK_SECONDS)


def tasks_found() -> list[str]:
    """Return lines that name the tasks of the project's apps, and the modules that are broken.

    A forked child imports them: a module may start threads, which no worker must inherit.
    """
    return _in_child(_name_tasks).splitlines()


def known_tasks() -> tuple[list[str], list[str]]:
    """Return the paths of tasks that this process can run, and why some of them are not known.

    Looked for are the modules that the project's packages have loaded, and the module ``tasks`` of
    each, which is imported. A job may name a task of another module: that is imported then.
    """
    faults = import_task_modules()
    packages = tuple(f"{package}." for package in task_packages())
    paths = {
        value.module_path
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(packages)
        for value in list(vars(module).values())
        # Not isinstance: a lazy object is made when it is asked for its class, and may fail.
        if issubclass(type(value), Task)
    }
    return sorted(paths), faults


def _name_tasks() -> str:
    paths, faults = known_tasks()
    rest = f" and {len(paths) - MOST_TASKS} more" if len(paths) > MOST_TASKS else ""
    named = ", ".join(paths[:MOST_TASKS]) + rest
    return "\n".join([printable(line) for line in (named or NO_TASKS, *faults)])


def _look(alias: str) -> str:
    try:
        missing = missing_migrations(alias)
    except (DatabaseError, InterfaceError, ImproperlyConfigured) as error:
        away = isinstance(error, Error) and dialect_for(connections[alias]).comes_back(error)
        return f"{AWAY}{error}" if away else f"{FOUND}{explain(error)}"
    if not missing:
        return FOUND
    option = "" if alias == "default" else f" --database {alias}"
    return (
        f"{FOUND}the database {alias!r} lacks {len(missing)} of Relay's migrations "
        f"({', '.join(missing)}). Run manage.py migrate{option}."
    )


def missing_migrations(alias: str) -> list[str]:
    """Return the names of Relay's migrations that are not applied to the database ``alias``."""
    loader = MigrationLoader(connections[alias])
    nodes = sorted(name for app, name in loader.graph.nodes if app == APP)
    return [name for name in nodes if (APP, name) not in loader.applied_migrations]


def _in_child(look: Callable[[], str]) -> str:
    """Return what ``look`` returns in a forked child, or a fault if that child died."""
    reader, writer = os.pipe()
    with threads_at_rest():
        pid = os.fork()
    if not pid:
        try:
            os.write(writer, look().encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text or "it could not be examined: the examiner died."
