"""The verbs on one queue, from the table of operations: pause, resume, delete, limits and rerank."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from django.core.management.base import CommandError

from relay_queue import conf, store
from relay_queue.cli.base import Output, Verb, add_json
from relay_queue.models import Queue
from relay_queue.operations import (
    QUEUE_OPERATIONS,
    RERANK,
    SET_LIMITS,
    Operation,
    QueueOperation,
)
from relay_queue.ranking import MAX_AGING_SECONDS, MIN_AGING_SECONDS
from relay_queue.store.queues import LIMITS

UNBOUNDED: Final = "none"

STRICT: Final = "strict"


@dataclass(frozen=True, slots=True)
class QueueVerb:
    """The verb of an operation on one queue; see `relay_queue.cli.base.Verb`.

    ``more`` declares the arguments behind the name of the queue, and ``perform`` changes the queue.
    """

    operation: Operation
    perform: Callable[[str, argparse.Namespace, Output], None]
    more: Callable[[argparse.ArgumentParser], None] | None = None

    @property
    def HELP(self) -> str:  # noqa: N802 - a module that is a verb has a constant of this name
        """The help of the verb."""
        return self.operation.help

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        add_json(parser)
        parser.add_argument("queue", metavar="QUEUE", help="Name of the queue.")
        if self.more is not None:
            self.more(parser)

    def run(self, options: argparse.Namespace, out: Output) -> int:
        """Perform the operation on the queue. To repeat it changes nothing."""
        self.perform(_known(options.queue), options, out)
        return 0


def _known(name: str) -> str:
    """Return the name if there is such a queue.

    The store creates a queue on first use, but an unknown name in a verb is a typing error. Raises
    ``CommandError`` with the known names.
    """
    known = set(Queue.objects.using(conf.get().database).values_list("name", flat=True))
    known |= set(conf.get().queues or ())
    if name not in known:
        names = f"The queues are {', '.join(sorted(known))}." if known else "There is none yet."
        raise CommandError(f"there is no queue {name!r}. {names}")
    return name


def _as_a_whole(
    operation: QueueOperation,
) -> Callable[[str, argparse.Namespace, Output], None]:
    def perform(queue: str, options: argparse.Namespace, out: Output) -> None:
        store.in_transaction(lambda tx: operation.verb(tx, queue))
        out.data({"queue": queue, **operation.facts})
        out.line(operation.done.format(queue=queue))

    return perform


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--capacity",
        metavar="N",
        type=_limit,
        help="Unfinished jobs that the queue admits; or none: no limit.",
    )
    parser.add_argument(
        "--max-running",
        metavar="N",
        type=_limit,
        help="Jobs of the queue that may run at once; or none: no limit.",
    )


def _set_limits(queue: str, options: argparse.Namespace, out: Output) -> None:
    """Set the limits that were given, and show both."""
    said = {name: getattr(options, name) for name in LIMITS}
    given: dict[str, int | None] = {
        name: None if value == UNBOUNDED else value
        for name, value in said.items()
        if value is not None
    }
    with store.transaction() as tx:
        limits = store.hold_limits(tx, queue)
        if given:
            store.set_limits(tx, queue, **given)
    limits |= given
    out.data({"queue": queue, **limits})
    shown = {n: "no limit" if limits[n] is None else f"{limits[n]:,}" for n in LIMITS}
    out.line(SET_LIMITS.done.format(queue=queue, **shown))


def _limit(text: str) -> int | str:
    if text == UNBOUNDED:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None


def _add_aging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--aging-seconds",
        metavar="N",
        type=_aging,
        required=True,
        help="Seconds worth one class; or strict: a lower class never goes before a higher one.",
    )


def _rerank(queue: str, options: argparse.Namespace, out: Output) -> None:
    aging_seconds = None if options.aging_seconds == STRICT else options.aging_seconds
    jobs = store.rerank(queue, aging_seconds)
    out.data({"queue": queue, "aging_seconds": aging_seconds, "jobs": jobs})
    how = "strict priority" if aging_seconds is None else f"{aging_seconds:g} s a class"
    out.line(RERANK.done.format(queue=queue, how=how, jobs=f"{jobs:,}"))


def _aging(text: str) -> float | str:
    if text == STRICT:
        return text
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor strict") from None
    if not MIN_AGING_SECONDS <= seconds <= MAX_AGING_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is not between {MIN_AGING_SECONDS:g} and {MAX_AGING_SECONDS:,.0f} seconds"
        )
    return seconds


VERBS: Final[dict[str, Verb]] = {
    **{op.command: QueueVerb(op, _as_a_whole(op)) for op in QUEUE_OPERATIONS},
    SET_LIMITS.command: QueueVerb(SET_LIMITS, _set_limits, _add_limits),
    RERANK.command: QueueVerb(RERANK, _rerank, _add_aging),
}
"""The verbs by their names."""
