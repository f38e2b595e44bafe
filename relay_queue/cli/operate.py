"""The verbs that operate on jobs, queues and workers, made from `relay_queue.operations`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from django.core.management.base import CommandError

from relay_queue import conf, operations, store
from relay_queue.cli.base import Verb, add_states, flag, whole_number
from relay_queue.cli.output import Output, counted, short
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job, Queue, Worker
from relay_queue.operations import JobOperation, Operation, QueueOperation, WorkerOperation
from relay_queue.ranking import MAX_AGING_SECONDS, MIN_AGING_SECONDS
from relay_queue.states import State, WorkerOrder
from relay_queue.store.queues import LIMITS
from relay_queue.validation import is_storable

SHOWN_IDS: Final = 20


# -- jobs, named by id or found by filters


def _add_jobs(operation: JobOperation, parser: argparse.ArgumentParser) -> None:
    """Declare job ids, the filters in their place, and a number if one is needed."""
    parser.add_argument("job_ids", metavar="ID", nargs="*", type=whole_number, help="Ids of jobs.")
    parser.add_argument("--queue", type=_name, help="Only jobs of this queue.")
    parser.add_argument("--task", type=_name, help="Only jobs of this task, by its dotted path.")
    add_states(parser, [state.value for state in operation.listed_states])
    text = "At most N jobs, the oldest first."
    parser.add_argument("--limit", metavar="N", type=whole_number, help=text)
    flag(parser, "--yes", help="Do not ask before changing more than one job.")
    if operation is operations.REQUEUE:
        flag(parser, "--all-dead", help="All dead letters: the same as --state dead.")
    number = operation.number
    if number is not None:
        bounds = f"{number.lowest} to {number.highest}"
        text = f"The new {number.name}, {bounds}; higher goes first."
        parser.add_argument("--to", metavar="N", type=int, required=True, help=text)


def _name(text: str) -> str:
    """Return a name that a row can have: the database would fail at any other."""
    if not is_storable(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no name: it has what is no text")
    return text


def _operate_on_jobs(operation: JobOperation, options: argparse.Namespace, out: Output) -> int:
    """Perform the operation on the jobs; return 1 if a named one could not be changed."""
    given = {} if operation.number is None else {operation.number.name: options.to}
    job_ids = _select(operation, options, operation.question.format(**given))
    changed, stopped = change(operation, job_ids, **given)
    skipped, missing = changed.skipped, changed.missing
    out.data(changed=changed.job_ids, skipped=skipped, missing=missing, stopped=stopped)
    done = operation.done.format(**given)
    out.line(f"{done} {counted(len(changed.job_ids), 'job')}{_listed(map(str, changed.job_ids))}.")
    if skipped:
        states = (f"{job_id} is {state}" for job_id, state in skipped.items())
        out.line(f"Skipped {counted(len(skipped), 'job')}{_listed(states)}.", "warning")
    if missing:
        ids = _listed(map(str, missing))
        out.line(f"Not found{ids}: never there, pruned or discarded.", "warning")
    if stopped:
        out.warn(f"Stopped: {stopped} Or name fewer jobs, with --limit.")
    return 1 if stopped or (options.job_ids and (skipped or missing)) else 0


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


def _select(operation: JobOperation, options: argparse.Namespace, question: str) -> list[int]:
    """Return the ids of the jobs to change.

    Asks before a change of several jobs that a filter found. Raises ``CommandError`` without ids
    and filters, or if no terminal can answer.
    """
    if operation is operations.REQUEUE and options.all_dead:
        if options.state and options.state != [State.DEAD.value]:
            raise CommandError("Give --all-dead or --state, not both.")
        options.state = [State.DEAD.value]
    filters = {name: getattr(options, name) for name in ("queue", "task") if getattr(options, name)}
    if options.limit is not None and options.limit < 1:
        raise CommandError(f"--limit is {options.limit}; it must be at least 1.")
    if options.job_ids:
        if filters or options.state:
            raise CommandError("Name job ids or filters, not both.")
        return list(dict.fromkeys(options.job_ids))
    if not filters and not options.state:
        raise CommandError("Name job ids, or filters such as --queue, --task and --state.")
    states = options.state or [state.value for state in operation.listed_states]
    found = Job.objects.using(conf.get().database).filter(state__in=states, **filters)
    job_ids = list(found.order_by("id").values_list("id", flat=True)[: options.limit])
    if len(job_ids) > 1 and not options.yes:
        _ask(f"{question.capitalize()} {counted(len(job_ids), 'job')}?")
    return job_ids


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Nobody can answer here; say --yes.")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise CommandError("Nothing was changed.")


def _listed(texts: Any) -> str:
    """Return ``: a, b, c``, cut after a few; empty for nothing."""
    texts = list(texts)
    more = f" and {len(texts) - SHOWN_IDS:,} more" if len(texts) > SHOWN_IDS else ""
    return f": {', '.join(texts[:SHOWN_IDS])}{more}" if texts else ""


# -- one queue; to repeat a verb changes nothing


def _add_queue(operation: Operation, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", help="Name of the queue.")


def _known_queue(options: argparse.Namespace) -> str:
    """Return the name of the queue if there is such a queue.

    The store creates a queue on first use, but an unknown name in a verb is a typing error. Raises
    ``CommandError`` with the known names.
    """
    name: str = options.queue
    known = set(Queue.objects.using(conf.get().database).values_list("name", flat=True))
    known |= set(conf.get().queues or ())
    if name not in known:
        names = f"The queues are {', '.join(sorted(known))}." if known else "There is none yet."
        raise CommandError(f"there is no queue {name!r}. {names}")
    return name


def _as_a_whole(operation: QueueOperation, options: argparse.Namespace, out: Output) -> None:
    queue = _known_queue(options)
    store.in_transaction(lambda tx: operation.verb(tx, queue))
    out.data(queue=queue, **operation.facts)
    out.line(operation.done.format(queue=queue))


def _add_limits(operation: Operation, parser: argparse.ArgumentParser) -> None:
    _add_queue(operation, parser)
    limit = partial(
        parser.add_argument,
        metavar="N",
        type=_number_or("none", int),
        default=argparse.SUPPRESS,
    )
    limit("--capacity", help="Unfinished jobs that the queue admits; or none: no limit.")
    limit("--max-running", help="Jobs of the queue that may run at once; or none: no limit.")


def _set_limits(operation: Operation, options: argparse.Namespace, out: Output) -> None:
    """Set the limits that were given, and show both."""
    queue = _known_queue(options)
    given = {name: getattr(options, name) for name in LIMITS if hasattr(options, name)}
    with store.transaction() as tx:
        limits = store.hold_limits(tx, queue)
        if given:
            store.set_limits(tx, queue, **given)
    limits |= given
    out.data(queue=queue, **limits)
    shown = {n: "no limit" if limits[n] is None else f"{limits[n]:,}" for n in LIMITS}
    out.line(operation.done.format(queue=queue, **shown))


def _add_aging(operation: Operation, parser: argparse.ArgumentParser) -> None:
    _add_queue(operation, parser)
    aging = _number_or("strict", _aging)
    text = "Seconds worth one class; or strict: a lower class never goes before a higher one."
    parser.add_argument("--aging-seconds", metavar="N", type=aging, required=True, help=text)


def _rerank(operation: Operation, options: argparse.Namespace, out: Output) -> None:
    queue, aging_seconds = _known_queue(options), options.aging_seconds
    jobs = store.rerank(queue, aging_seconds)
    out.data(queue=queue, aging_seconds=aging_seconds, jobs=jobs)
    how = "strict priority" if aging_seconds is None else f"{aging_seconds:g} s a class"
    out.line(operation.done.format(queue=queue, how=how, jobs=f"{jobs:,}"))


def _number_or(word: str, convert: Callable[[str], float]) -> Callable[[str], float | None]:
    """Return a type of argument: a number, or a word that stands for None."""

    def parse(text: str) -> float | None:
        try:
            return None if text == word else convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {word}") from None

    return parse


def _aging(text: str) -> float:
    seconds = float(text)
    if not MIN_AGING_SECONDS <= seconds <= MAX_AGING_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is not between {MIN_AGING_SECONDS:g} and {MAX_AGING_SECONDS:,.0f} seconds"
        )
    return seconds


# -- workers, named by name or by id


def _add_workers(operation: WorkerOperation, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workers", metavar="WORKER", nargs="*", help="Names or ids of workers.")
    flag(parser, "--all", help="Every worker that has not ended.")
    if operation.undo is not None:
        flag(parser, "--undo", help="Let them claim again.")


def _order(operation: WorkerOperation, options: argparse.Namespace, out: Output) -> int:
    """Give the order to the chosen workers; return 1 if one of them could not take it."""
    if operation.undo is not None and options.undo:
        operation = operation.undo
    worker_ids = _chosen(options)
    with store.transaction() as tx:
        obeying = store.order_workers(tx, worker_ids, operation.order)
    passed = sorted(set(worker_ids) - set(obeying))
    out.data(told=obeying, passed_over=passed)
    out.line(f"{operation.done}: {_names(obeying)}. They obey within about a second.")
    if passed:
        out.line(f"Ended, or told to stop, already: {_names(passed)}.", "warning")
    return 1 if passed else 0


def _chosen(options: argparse.Namespace) -> list[int]:
    """Return the ids of the chosen workers. Raises ``CommandError`` if the choice is unclear."""
    if bool(options.workers) == options.all:
        raise CommandError("Name workers, or say --all. relay status lists them.")
    if options.all:
        rows = Worker.objects.using(conf.get().database)
        live = rows.filter(stopped_at=None).exclude(ordered=WorkerOrder.STOP)
        return list(live.order_by("id").values_list("id", flat=True))
    return list(dict.fromkeys(_find(text) for text in options.workers))


def _find(text: str) -> int:
    rows = Worker.objects.using(conf.get().database)
    named = rows.filter(name=text) if is_storable(text) else rows.none()
    live = named.filter(stopped_at=None).order_by("id")
    found = list(live.values_list("id", flat=True))
    if len(found) > 1:
        ids = ", ".join(map(str, found))
        raise CommandError(
            f"{len(found)} workers have the name {text!r}; name one by its id: {ids}."
        )
    if not found and text.isascii() and text.isdigit() and len(text) <= 18:
        found = list(rows.filter(pk=int(text)).values_list("id", flat=True))
    if not found:
        raise CommandError(f"there is no worker {text!r}. relay status lists them.")
    return found[0]


def _names(worker_ids: list[int]) -> str:
    rows = Worker.objects.using(conf.get().database).filter(pk__in=worker_ids).order_by("id")
    return ", ".join(f"{short(row.name)} (id {row.pk})" for row in rows) or "nobody"


def _verbs(
    table: Iterable[Operation], execute: Callable[..., int | None], declare: Callable[..., None]
) -> dict[str, Verb]:
    """Return the verbs of some operations; both functions take the operation first."""
    return {
        op.command: Verb(partial(execute, op), partial(declare, op), op.help)
        for op in table
        if op.command
    }


VERBS: Final = {
    **_verbs(operations.JOB_OPERATIONS, _operate_on_jobs, _add_jobs),
    **_verbs(operations.QUEUE_OPERATIONS, _as_a_whole, _add_queue),
    **_verbs([operations.SET_LIMITS], _set_limits, _add_limits),
    **_verbs([operations.RERANK], _rerank, _add_aging),
    **_verbs(operations.WORKER_OPERATIONS, _order, _add_workers),
}
"""The verbs by their names."""
