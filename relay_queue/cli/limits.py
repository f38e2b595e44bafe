"""``relay limits``: show or change the limits of a queue."""

from __future__ import annotations

import argparse
from typing import Final

from relay_queue import conf, store
from relay_queue.cli import queues
from relay_queue.cli.base import Output, add_json
from relay_queue.models import Queue
from relay_queue.wakeup import ring_on_commit

HELP = (
    "Show the limits of a queue, or change those that are given. Workers obey at their next claim; "
    "jobs that are there stay."
)

UNBOUNDED: Final = "none"
NAMES: Final = ("capacity", "max_running")


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
    given = {name: getattr(options, name) for name in NAMES if getattr(options, name) is not None}
    with store.transaction() as tx:
        store.ensure_queue(tx, queue)
        row = Queue.objects.using(conf.get().database).get(name=queue)
        limits: dict[str, int | None] = {name: getattr(row, name) for name in NAMES}
        limits |= {name: None if value == UNBOUNDED else value for name, value in given.items()}
        if given:
            store.set_limits(
                tx, queue, capacity=limits["capacity"], max_running=limits["max_running"]
            )
            ring_on_commit(conf.get().database)
    out.data({"queue": queue, **limits})
    shown = ("no limit" if limits[name] is None else f"{limits[name]:,}" for name in NAMES)
    out.line("Queue {}: capacity {}, max running {}.".format(queue, *shown))
    return 0


def _limit(text: str) -> int | str:
    if text == UNBOUNDED:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None
