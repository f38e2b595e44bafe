"""The verbs on jobs, named by id or found by filters, from the table of operations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.core.management.base import CommandError

from relay_queue import conf, store
from relay_queue.cli.base import Output, add_json, whole_number
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job
from relay_queue.operations import JOB_OPERATIONS, REQUEUE, JobOperation
from relay_queue.states import State
from relay_queue.validation import is_storable

SHOWN_IDS: Final = 20


@dataclass(frozen=True, slots=True)
class JobVerb:
    """The verb of an operation on jobs; see `relay_queue.cli.base.Verb`."""

    operation: JobOperation

    @property
    def HELP(self) -> str:  # noqa: N802 - a module that is a verb has a constant of this name
        """The help of the verb."""
        return self.operation.help

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare job ids, the filters in their place, and a number if one is needed."""
        add_json(parser)
        _add_selection(parser, self.operation.listed_states)
        if self.operation is REQUEUE:
            parser.add_argument(
                "--all-dead",
                action="store_true",
                help="All dead letters: the same as --state dead.",
            )
        number = self.operation.number
        if number is not None:
            parser.add_argument(
                "--to",
                metavar="N",
                type=int,
                required=True,
                help=f"The new {number.name}, {number.lowest} to {number.highest}; higher goes first.",
            )

    def run(self, options: argparse.Namespace, out: Output) -> int:
        """Perform the operation on the selected jobs, and show the result."""
        operation = self.operation
        given = {} if operation.number is None else {operation.number.name: options.to}
        _all_dead(options)
        question = operation.question.format(**given)
        job_ids, named = _select(options, operation.listed_states, question)
        changed, stopped = change(operation, job_ids, **given)
        return _show(changed, stopped, named, operation.done.format(**given), out)


VERBS: Final = {operation.command: JobVerb(operation) for operation in JOB_OPERATIONS}
"""The verbs by their names."""


def name(text: str) -> str:
    """Return a name that a row can have: the database would fail at any other."""
    if not is_storable(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no name: it has what is no text")
    return text


def change(
    operation: JobOperation, job_ids: Sequence[int], **given: int
) -> tuple[store.Changed, str]:
    """Perform an operation batch by batch; return what changed, and why a full queue stopped it."""
    done = store.Changed()
    try:
        for changed in operation.change(job_ids, **given):
            done.add(changed)
    except QueueFull as full:
        return done, str(full)
    return done, ""


def _add_selection(parser: argparse.ArgumentParser, states: Sequence[State]) -> None:
    parser.add_argument("job_ids", metavar="ID", nargs="*", type=whole_number, help="Ids of jobs.")
    parser.add_argument("--queue", type=name, help="Only jobs of this queue.")
    parser.add_argument("--task", type=name, help="Only jobs of this task, by its dotted path.")
    parser.add_argument(
        "--state",
        action="append",
        choices=[state.value for state in states],
        help="Only jobs in this state; may be given several times.",
    )
    parser.add_argument(
        "--limit", metavar="N", type=whole_number, help="At most N jobs, the oldest first."
    )
    parser.add_argument(
        "--yes", action="store_true", help="Do not ask before changing more than one job."
    )


def _all_dead(options: argparse.Namespace) -> None:
    """Replace ``--all-dead``, which only one verb has, by its filter."""
    if getattr(options, "all_dead", False):
        if options.state and options.state != [State.DEAD.value]:
            raise CommandError("Give --all-dead or --state, not both.")
        options.state = [State.DEAD.value]


def _select(
    options: argparse.Namespace, states: Sequence[State], question: str
) -> tuple[list[int], bool]:
    """Return the ids of the jobs to change, and whether they were named one by one.

    Asks before a change of several jobs that a filter found. Raises ``CommandError`` without ids
    and filters, or if no terminal can answer.
    """
    filters = {name: getattr(options, name) for name in ("queue", "task") if getattr(options, name)}
    if options.limit is not None and options.limit < 1:
        raise CommandError(f"--limit is {options.limit}; it must be at least 1.")
    if options.job_ids:
        if filters or options.state:
            raise CommandError("Name job ids or filters, not both.")
        return list(dict.fromkeys(options.job_ids)), True
    if not filters and not options.state:
        raise CommandError("Name job ids, or filters such as --queue, --task and --state.")
    found = Job.objects.using(conf.get().database).order_by("id")
    found = found.filter(state__in=options.state or [state.value for state in states], **filters)
    job_ids = list(found.values_list("id", flat=True)[: options.limit])
    if len(job_ids) > 1 and not options.yes:
        _ask(f"{question.capitalize()} {len(job_ids):,} jobs?")
    return job_ids, False


def _show(changed: store.Changed, stopped: str, named: bool, done: str, out: Output) -> int:
    """Show the result; return 1 if a named job could not be changed."""
    out.data(
        {
            "changed": changed.job_ids,
            "skipped": changed.skipped,
            "missing": changed.missing,
            "stopped": stopped,
        }
    )
    out.line(f"{done} {_count(changed.job_ids)}{_listed(map(str, changed.job_ids))}.")
    if changed.skipped:
        states = (f"{job_id} is {state}" for job_id, state in changed.skipped.items())
        out.line(f"Skipped {_count(changed.skipped)}{_listed(states)}.", "warning")
    if changed.missing:
        ids = _listed(map(str, changed.missing))
        out.line(f"Not found{ids}: never there, pruned or discarded.", "warning")
    if stopped:
        out.warn(f"Stopped: {stopped} Or name fewer jobs, with --limit.")
        return 1
    return 1 if named and (changed.skipped or changed.missing) else 0


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Nobody can answer here; say --yes.")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise CommandError("Nothing was changed.")


def _count(jobs: Any) -> str:
    return "1 job" if len(jobs) == 1 else f"{len(jobs):,} jobs"


def _listed(texts: Any) -> str:
    """Return ``: a, b, c``, cut after a few; empty for nothing."""
    texts = list(texts)
    more = f" and {len(texts) - SHOWN_IDS:,} more" if len(texts) > SHOWN_IDS else ""
    return f": {', '.join(texts[:SHOWN_IDS])}{more}" if texts else ""
