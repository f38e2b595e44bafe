"""``relay pause``: stop claiming from a queue."""

from __future__ import annotations

import argparse

from relay_queue import store
from relay_queue.cli import queues
from relay_queue.cli.base import Output, add_json

HELP = (
    "Stop claiming jobs from a queue. Jobs that run are finished, and enqueues are still accepted."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    queues.add_argument(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Pause the queue; pausing it again changes nothing."""
    queue = queues.check(options.queue)
    with store.transaction() as tx:
        store.pause(tx, queue)
    out.data({"queue": queue, "paused": True})
    out.line(f"Queue {queue} is paused. relay resume {queue} opens it again.")
    return 0
