"""``manage.py runworker``: run jobs. This module parses arguments; the supervisor does the work."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from relay_queue import __version__, conf
from relay_queue.cli.base import explain, flag, nearest
from relay_queue.cli.output import counted
from relay_queue.db.gate import gate_of
from relay_queue.exceptions import ConfigurationError, shown
from relay_queue.management.preflight import database_fault, tasks_found
from relay_queue.startup import stopped_at_once
from relay_queue.worker import reload
from relay_queue.worker.lifetime import leave
from relay_queue.worker.logwriter import log_writer
from relay_queue.worker.options import WorkerOptions
from relay_queue.worker.supervisor import Supervisor
from relay_queue.worker.watchdog import GateWatch

if TYPE_CHECKING:
    from relay_queue.backend import RelayBackend

LOG_SECONDS = 1.0
"""Seconds that the last lines of the log may take to be written."""

# The column holds 100 characters, and each process adds its number.
MAX_NAME_CHARS = 90


EVERY_QUEUE = "*"
"""The spelling of all queues in other job queues, accepted here, too."""


class Command(BaseCommand):
    """Checks the arguments, prints what will run, and supervises the workers."""

    help = (
        "Run jobs until told to stop. The first TERM or Ctrl-C lets running jobs finish, "
        "the second hands them back."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the arguments, also by their names in other job queues."""
        _add_what_to_run(parser)
        _add_how_to_run(parser)

    def handle(self, **given: Any) -> None:
        """Run the workers; exit with the code of the supervisor if it is not 0."""
        try:
            settings = conf.get()
        except ConfigurationError as error:
            raise CommandError(explain(error)) from error
        options = worker_options(given, settings)
        processes = _bounded("processes", given, settings)
        if given["reload"] and given["parent_fd"] is None:
            code = reload.run()
        else:
            with stopped_at_once():  # the wait for a database that is away has no end
                code = self._supervise(options, processes, settings, given)
        if not log_writer.finish(LOG_SECONDS):
            # The reader of the log does not read. Python's own exit would wait for it.
            leave(code)
        if code:
            raise SystemExit(code)

    def _supervise(
        self,
        options: WorkerOptions,
        processes: int,
        settings: conf.RelaySettings,
        given: dict[str, Any],
    ) -> int:
        # A system check, for example, may have opened a connection: no worker may inherit it.
        connections.close_all()
        fault = database_fault(settings.database)
        if fault:
            raise CommandError(fault)
        if given["verbosity"] > 0:
            for line in banner(options, processes, settings.database, tasks_found()):
                self.stdout.write(line)
            self.stdout.flush()
        # Imported before the fork, so that the workers share its memory and start quickly.
        from relay_queue.worker.main import run

        gate = gate_of(connections[settings.database])
        return Supervisor(
            options,
            processes,
            run,
            ready_timeout_seconds=settings.ready_timeout_seconds,
            gate_watch=None if gate is None else GateWatch(gate, settings.gate_hold_seconds),
            parent=_parent(given["parent_fd"]),
        ).run()


def _add_what_to_run(parser: CommandParser) -> None:
    add_names = partial(parser.add_argument, action="append", default=[], metavar="NAME[,NAME]")
    text = "Serve these queues only, in turn and in this order; * is all. May be repeated."
    add_names("--queue", "--queue-name", help=text)
    text = "Serve every queue but these. May be repeated."
    add_names("--exclude-queue", "--exclude-queues", help=text)
    text = "Run only jobs enqueued through this alias of TASKS. Default: all that Relay backs."
    parser.add_argument("--backend", metavar="ALIAS", help=text)
    flag(parser, "--drain", "--batch", help="End when no ready, due or running job is left.")
    text = "Replace each process after N jobs; with --drain, end it."
    parser.add_argument("--max-jobs", "--max-tasks", type=int, metavar="N", help=text)
    text = "Accepted for scripts written for other queues. Not needed: idle workers are woken."
    parser.add_argument("--interval", type=float, metavar="SECONDS", help=text)


def _add_how_to_run(parser: CommandParser) -> None:
    text = "Jobs that each process runs at a time."
    parser.add_argument("--concurrency", type=int, metavar="N", help=text)
    parser.add_argument("--processes", type=int, metavar="N", help="How many worker processes.")
    add_seconds = partial(parser.add_argument, type=float, metavar="SECONDS")
    text = "Length of leases, whatever the jobs ask for. They are renewed while a job runs."
    add_seconds("--lease-seconds", help=text)
    text = "How long running jobs may take to finish when told to stop."
    add_seconds("--shutdown-timeout", help=text)
    parser.add_argument("--name", help="Name shown for these workers. Default: the host's name.")
    flag(parser, "--reload", help="Start again when the code changes. For development.")
    # The socket to the process that watches the code, see worker/reload.py.
    parser.add_argument(reload.PARENT_OPTION, type=int, help=argparse.SUPPRESS)


def worker_options(given: dict[str, Any], settings: conf.RelaySettings) -> WorkerOptions:
    """Resolve the arguments. Raises ``CommandError`` that names the value and the limit."""
    _check_interval(given["interval"])
    queues, excluded = _queues(given, settings)
    return WorkerOptions(
        name=_name(given["name"]),
        queues=queues,
        exclude_queues=excluded,
        backend=_backend(given["backend"]),
        concurrency=_bounded("concurrency", given, settings),
        lease_seconds=_lease_seconds(given["lease_seconds"], settings),
        shutdown_timeout_seconds=_bounded(
            "shutdown_timeout", given, settings, key="shutdown_timeout_seconds"
        ),
        drain=given["drain"],
        max_jobs=_max_jobs(given["max_jobs"]),
    )


def banner(
    options: WorkerOptions, processes: int, database: str, tasks: Sequence[str]
) -> list[str]:
    """Return the lines that describe the workers before they start.

    ``tasks`` are the names of those that are known, in a line, and lines on what cannot be known.
    """
    if options.queues is not None:
        queues = ", ".join(options.queues)
    elif options.exclude_queues:
        queues = f"all but {', '.join(options.exclude_queues)}"
    else:
        queues = "all"
    count = counted(processes, "process", "processes")
    slots = counted(options.concurrency, "slot")
    # No connection is opened for this; the name is in the settings.
    where = connections[database].settings_dict["NAME"]
    return [
        f"Relay {__version__} worker {options.name}: {count} with {slots} each",
        f"  queues    {queues}",
        f"  backend   {options.backend or 'all that Relay backs'}",
        f"  database  {database} ({where})",
        f"  tasks     {tasks[0]}",
        *(f"            {line}" for line in tasks[1:]),
        "Stop with Ctrl-C: running jobs may finish. Again: they are handed back.",
    ]


def _queues(
    given: dict[str, Any], settings: conf.RelaySettings
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    everything = EVERY_QUEUE in _split(given["queue"])
    wanted = () if everything else _names(given["queue"], settings)
    excluded = _names(given["exclude_queue"], settings)
    if not wanted:
        return None, excluded
    left = tuple(name for name in wanted if name not in excluded)
    if not left:
        raise CommandError("--exclude-queue leaves none of the queues that --queue names.")
    return left, ()


def _names(parts: Iterable[str], settings: conf.RelaySettings) -> tuple[str, ...]:
    names = _split(parts)
    for name in names:
        _check_queue(name, settings)
    return tuple(dict.fromkeys(names))


def _split(parts: Iterable[str]) -> list[str]:
    return [name.strip() for part in parts for name in part.split(",")]


def _check_queue(name: str, settings: conf.RelaySettings) -> None:
    fault = conf.queue_name_fault(name)
    if fault:
        raise CommandError(f"the queue name {name!r} {fault}.")
    if settings.queues is not None and name not in settings.queues:
        hint = _hint(name, settings.queues)
        raise CommandError(f'{name!r} is not one of the queues in RELAY["QUEUES"]. {hint}')
    admitted = _admitted_queues()
    if admitted and name not in admitted:
        hint = _hint(name, sorted(admitted))
        raise CommandError(f"no alias of TASKS admits the queue {name!r} in its QUEUES. {hint}")


def _admitted_queues() -> set[str]:
    """Return the queues to which the aliases that Relay backs admit jobs; empty if it is every queue."""
    listed = [backend.queues for backend in _backends().values() if backend is not None]
    return set[str]().union(*listed) if all(listed) else set()


def _backends() -> dict[str, RelayBackend | None]:
    """Return the backends of Relay by their aliases, with None for an alias of another's."""
    from relay_queue.backend import RelayBackend
    from relay_queue.compat import task_backends

    backends = {alias: task_backends[alias] for alias in task_backends}
    return {a: found if isinstance(found, RelayBackend) else None for a, found in backends.items()}


def _backend(alias: str | None) -> str | None:
    if alias is None:
        return None
    backends = _backends()
    if backends.get(alias) is not None:
        return alias
    what = "is not backed by Relay" if alias in backends else "is not in TASKS"
    aliases = [name for name, backend in backends.items() if backend is not None]
    raise CommandError(f"the backend alias {alias!r} {what}. {_hint(alias, aliases)}")


def _hint(name: str, known: Collection[str]) -> str:
    return nearest(name, known, f"Use one of: {', '.join(known)}." if known else "There are none.")


def _refusal(option: str, value: Any, way_out: str) -> CommandError:
    return CommandError(f"--{option} is {shown(value)}. {way_out}")


def _bounded(name: str, given: dict[str, Any], settings: conf.RelaySettings, key: str = "") -> Any:
    """Hold an argument to the bounds of the setting that it replaces, by default of its name."""
    value, key = given[name], key or name
    if value is None:
        return getattr(settings, key)
    problems = conf.problems({key.upper(): value})
    if problems:
        raise _refusal(name.replace("_", "-"), value, problems[0].hint)
    return value


def _lease_seconds(value: float | None, settings: conf.RelaySettings) -> float | None:
    low, high = settings.min_lease_seconds, settings.max_lease_seconds
    if value is not None and not low <= value <= high:
        changed = 'RELAY["MIN_LEASE_SECONDS"] and RELAY["MAX_LEASE_SECONDS"]'
        raise _refusal("lease-seconds", value, f"Use {low:g} to {high:g}, or change {changed}.")
    return value


def _check_interval(value: float | None) -> None:
    """Refuse what is no pause, though it is not used: it was meant to be something else."""
    if value is not None and not 0 < value < inf:
        way_out = "Use seconds above 0, or leave it out: idle workers are woken."
        raise _refusal("interval", value, way_out)


def _max_jobs(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise _refusal("max-jobs", value, "Use 1 or more, or leave it out for no limit.")
    return value


def _name(value: str | None) -> str:
    if value is None:
        return socket.gethostname()[:MAX_NAME_CHARS]
    if not 1 <= len(value) <= MAX_NAME_CHARS or not value.isprintable():
        way_out = f"Use 1 to {MAX_NAME_CHARS} characters that can be printed."
        raise _refusal("name", value, way_out)
    return value


def _parent(descriptor: int | None) -> socket.socket | None:
    if descriptor is None:
        return None
    parent = socket.socket(fileno=descriptor)
    # Programs that task functions start must not keep the socket open.
    parent.set_inheritable(False)
    return parent
