"""``relay limits``: show or change the limits of a queue."""

from __future__ import annotations

import argparse
from typing import Final

from relay_queue import store
from relay_queue.cli import queues
from relay_queue.cli.base import Output, add_json
from relay_queue.store.operate import LIMITS

HELP = (
    "Show the limits of a queue, or change those that are given. Workers obey at their next claim; "
    "jobs that are there stay."
)

UNBOUNDED: Final = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    queues.add_argument(parser)
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


def run(options: argparse.Namespace, out: Output) -> int:
    """Change what was given and show the limits."""
    queue = queues.check(options.queue)
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
    shown = ("no limit" if limits[name] is None else f"{limits[name]:,}" for name in LIMITS)
    out.line("Queue {}: capacity {}, max running {}.".format(queue, *shown))
    return 0


def _limit(text: str) -> int | str:
    if text == UNBOUNDED:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None
