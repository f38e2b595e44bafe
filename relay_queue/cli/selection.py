"""Which jobs an operator's verb is to change: named by id, or found by filters; and doing it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from django.core.management.base import CommandError

from relay_queue import conf, store
from relay_queue.cli.base import Output
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job
from relay_queue.states import State
from relay_queue.store.bounds import MAX_ID, is_storable

BATCH: Final = 1_000
"""Jobs that one transaction changes at the most."""

SHOWN_IDS: Final = 20

BatchVerb = Callable[[store.Transaction, Sequence[int]], store.Changed]


@dataclass(slots=True)
class Tally:
    """What was changed, what was skipped with the state it was found in, what was not there."""

    changed: list[int] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    stopped: str = ""
    """Why the rest was left alone, where a queue had no room."""


def whole(text: str) -> int:
    """Return a whole number that a column can hold: the database would fail at a longer one."""
    try:
        number = int(text)
    except ValueError:  # also for more digits than Python reads
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
    if abs(number) > MAX_ID:
        raise argparse.ArgumentTypeError(f"{text[:40]} is too large; the limit is {MAX_ID}")
    return number


def name(text: str) -> str:
    """Return a name that a row can have: the database would fail at any other."""
    if not is_storable(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no name: it has what is no text")
    return text


def add_arguments(parser: argparse.ArgumentParser, states: Sequence[State]) -> None:
    """Declare job ids, and the filters by which jobs in one of ``states`` are found instead."""
    parser.add_argument("job_ids", metavar="ID", nargs="*", type=whole, help="Ids of jobs.")
    parser.add_argument("--queue", type=name, help="Only jobs of this queue.")
    parser.add_argument("--task", type=name, help="Only jobs of this task, by its dotted path.")
    parser.add_argument(
        "--state",
        action="append",
        choices=[state.value for state in states],
        help="Only jobs in this state; may be given several times.",
    )
    parser.add_argument(
        "--limit", metavar="N", type=whole, help="At most N jobs, the oldest first."
    )
    parser.add_argument(
        "--yes", action="store_true", help="Do not ask before changing more than one job."
    )


def select(
    options: argparse.Namespace, states: Sequence[State], verb: str
) -> tuple[list[int], bool]:
    """Return the ids of the jobs to change, and whether they were named one by one.

    Asks before more than one job that a filter found. Raises ``CommandError`` if nothing was
    asked for, or if there is nobody to ask.
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
        _ask(f"{verb.capitalize()} {len(job_ids):,} jobs?")
    return job_ids, False


def change(job_ids: Sequence[int], verb: BatchVerb) -> Tally:
    """Apply a verb of the store in transactions of at most ``BATCH`` jobs, and ring the workers."""
    tally = Tally()
    for batch in _batches(job_ids):
        try:
            changed = store.in_transaction(lambda tx, ids=batch: verb(tx, ids))  # type: ignore[misc]
        except QueueFull as full:
            tally.stopped = str(full)
            break
        tally.changed += changed.job_ids
        tally.skipped |= changed.skipped
        known = {*changed.job_ids, *changed.skipped}
        tally.missing += [job_id for job_id in batch if job_id not in known]
    return tally


def show(tally: Tally, named: bool, done: str, out: Output) -> int:
    """Show what happened; return 1 if a job that was named could not be changed."""
    out.data(
        {
            "changed": tally.changed,
            "skipped": tally.skipped,
            "missing": tally.missing,
            "stopped": tally.stopped,
        }
    )
    out.line(f"{done} {_count(tally.changed)}{_listed(map(str, tally.changed))}.")
    if tally.skipped:
        states = (f"{job_id} is {state}" for job_id, state in tally.skipped.items())
        out.line(f"Skipped {_count(tally.skipped)}{_listed(states)}.", "warning")
    if tally.missing:
        ids = _listed(map(str, tally.missing))
        out.line(f"Not found{ids}: never there, pruned or discarded.", "warning")
    if tally.stopped:
        out.warn(f"Stopped: {tally.stopped} Or name fewer jobs, with --limit.")
        return 1
    return 1 if named and (tally.skipped or tally.missing) else 0


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Nobody can answer here; say --yes.")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise CommandError("Nothing was changed.")


def _batches(job_ids: Sequence[int]) -> Iterator[list[int]]:
    ids = iter(job_ids)
    while batch := list(islice(ids, BATCH)):
        yield batch


def _count(jobs: Any) -> str:
    return "1 job" if len(jobs) == 1 else f"{len(jobs):,} jobs"


def _listed(texts: Any) -> str:
    """Return ``: a, b, c``, cut after a few; empty for nothing."""
    texts = list(texts)
    more = f" and {len(texts) - SHOWN_IDS:,} more" if len(texts) > SHOWN_IDS else ""
    return f": {', '.join(texts[:SHOWN_IDS])}{more}" if texts else ""
