"""The frame of ``manage.py relay``: the list of verbs, how one is run, and how it fails.

A verb is a `Verb` in the dictionary ``VERBS`` of a module of `relay_queue.cli`: ``lab`` has the
laboratory's, ``upkeep`` what keeps a database in order, ``operate`` those made from the tables of
`relay_queue.operations`, and ``doctor``, ``inspect`` and ``status`` have themselves.

Only the module of the verb that runs is imported.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, InterfaceError

from relay_queue import operations, quantities
from relay_queue.cli.output import Output
from relay_queue.exceptions import RelayError
from relay_queue.logs import printable
from relay_queue.validation import MAX_ID

_OPERATIONS: Final = (
    *operations.JOB_OPERATIONS,
    *operations.QUEUE_OPERATIONS,
    operations.SET_LIMITS,
    operations.RERANK,
    operations.QUIET,
    operations.STOP,
)

VERBS: Final = {
    "demo": "run a few jobs on a scratch database and show what happened",
    "drill": "execute the failure table on scratch databases",
    "status": "show queues, workers and dead letters",
    "inspect": "show what is in the log, the tables and the ledger",
    "verify": "check everything that is stored; exit with 1 on any fault",
    "recover": "end the leases whose time or owner is gone",
    **{operation.command: operation.summary for operation in _OPERATIONS},
    "schedules": "list, sync, pause, resume and run schedules",
    "prune": "delete old finished jobs",
    "backup": "copy the database while it is in use",
    "doctor": "show versions, settings, workers and what is wrong with them",
    "bench": "measure this machine beside bare SQLite",
}
"""The verbs, in the order in which the help lists them, with one line each."""

_MODULES: Final = {
    **{operation.command: "operate" for operation in _OPERATIONS},
    **dict.fromkeys(("demo", "drill", "bench"), "lab"),
    **dict.fromkeys(("verify", "recover", "prune", "backup"), "upkeep"),
}
"""The modules of the verbs; one that is not here has a module of its name."""

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as shells use it."""

READER_GONE: Final = 141
"""Exit code when the program that reads the output has ended, as shells use it."""

# Parts of the messages of all vendors about missing tables or columns.
_NO_TABLES: Final = ("no such table", "does not exist", "doesn't exist", "no such column")


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: the function that executes it, and the one that declares its arguments.

    ``execute`` gets the namespace of argparse and an `Output`; it returns the exit code, or None
    for 0. Its docstring is the help of the verb if there is no ``text``. Each verb but one without
    data has ``--json``, which the `Output` handles.
    """

    execute: Callable[[argparse.Namespace, Output], int | None]
    declare: Callable[[argparse.ArgumentParser], Any] | None = None
    text: str = ""
    has_data: bool = True

    @property
    def help(self) -> str:
        """What the verb does, in a sentence or two."""
        return self.text or inspect.getdoc(self.execute) or ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the verb."""
        if self.has_data:
            flag(parser, "--json", help="Print JSON, for programs.")
        if self.declare is not None:
            self.declare(parser)


def flag(parser: argparse.ArgumentParser, *names: str, help: str) -> None:  # noqa: A002 - as argparse
    """Declare an option without a value."""
    parser.add_argument(*names, action="store_true", help=help)


def add_states(parser: argparse.ArgumentParser, states: list[str]) -> None:
    """Declare ``--state``, a filter of jobs."""
    text = "Only jobs in this state; may be given several times."
    parser.add_argument("--state", action="append", choices=states, help=text)


def whole_number(text: str) -> int:
    """Return a whole number that a column can hold, for argparse.

    Raises ``ArgumentTypeError``; the database would fail at a longer number.
    """
    try:
        number = int(text)
    except ValueError:  # also for more digits than Python reads
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
    if abs(number) > MAX_ID:
        raise argparse.ArgumentTypeError(f"{text[:40]} is too large; the limit is {MAX_ID}")
    return number


def duration_argument(text: str) -> float:
    """Return the seconds of ``7d``, ``12h``, ``30m``, ``45s`` or ``45``, for argparse.

    Raises ``ArgumentTypeError`` for anything else.
    """
    try:
        return quantities.parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def nearest(text: str, known: Collection[str], otherwise: str, cutoff: float = 0.6) -> str:
    """Return a hint at the known name that is most like a wrong one, or another hint."""
    near = get_close_matches(text, list(known), n=1, cutoff=cutoff)
    return f"Did you mean {near[0]!r}?" if near else otherwise


def known_name(
    text: str, known: Collection[str], what: str, every: str, cutoff: float = 0.6
) -> str:
    """Check a name, for argparse. Raises ``ArgumentTypeError`` with the nearest one, or with all."""
    if text in known:
        return text
    hint = nearest(text, known, f"The {every} are {', '.join(known)}.", cutoff)
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}. {hint}")


def verb_name(text: str) -> str:
    """Check the name of a verb, for argparse. Raises ``ArgumentTypeError`` for another."""
    return known_name(text, VERBS, "a verb of relay", "verbs")


def load(verb: str) -> Verb:
    """Import the module of a verb. Raises ``CommandError`` if this installation lacks it."""
    name = f"relay_queue.cli.{_MODULES.get(verb, verb)}"
    try:
        found: Verb = importlib.import_module(name).VERBS[verb]
        return found
    except ModuleNotFoundError as missing:
        if missing.name != name:
            raise
        raise CommandError(f"relay {verb} is not part of this installation.") from missing


def parse(
    verb: str, arguments: list[str], seed: argparse.Namespace, *, command_line: bool
) -> argparse.Namespace:
    """Parse what follows the name of the verb, over the options in ``seed``.

    Wrong usage exits with code 2 on the ``command_line`` and raises ``CommandError`` elsewhere.
    """
    found, command = load(verb), BaseCommand()
    command.help, command.requires_system_checks = found.help, []
    # Django's parser has the options that every command has.
    parser = command.create_parser("manage.py", f"relay {verb}")
    parser.called_from_command_line = command_line
    found.add_arguments(parser)
    return parser.parse_args(arguments, seed)


def run(verb: str, options: argparse.Namespace, out: Output) -> int:
    """Run a verb and return its exit code.

    Expected failures become a ``CommandError`` of one message, unless ``options.traceback``.
    """
    try:
        code = load(verb).execute(options, out) or 0
        out.flush()
        return code
    except BrokenPipeError:
        out.abandon()
        return READER_GONE
    except KeyboardInterrupt:
        out.warn("Interrupted.")
        return INTERRUPTED
    except (RelayError, ImproperlyConfigured, DatabaseError, InterfaceError) as error:
        if options.traceback:
            raise
        raise CommandError(printable(explain(error))) from error


def explain(error: Exception) -> str:
    """Return the meaning of an expected failure, and the way out if there is one."""
    text = str(error) or type(error).__name__
    if not isinstance(error, (DatabaseError, InterfaceError)):
        return text
    # The driver of a server adds lines: the place in the statement, or a hint that it is down.
    lines = [line.strip() for line in text.splitlines()]
    if any(words in text for words in _NO_TABLES) and not _was_refused(error):
        return (
            f"the tables of Relay are missing or out of date ({lines[0]}). Run manage.py migrate."
        )
    return f"the database cannot be used: {' '.join(lines)}"


def _was_refused(error: Exception) -> bool:
    """Whether a server refused the connection: it knows no such role or database."""
    cause = error.__cause__
    return getattr(cause, "pgconn", None) is not None and getattr(cause, "sqlstate", None) is None


def verb_list() -> str:
    """Return the verbs and what they do, for the end of ``relay --help``."""
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {text}" for name, text in VERBS.items()]
    return "\n".join(["verbs:", *lines, "", "relay VERB --help shows the arguments of a verb."])
