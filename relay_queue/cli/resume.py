"""``relay resume``: claim from a paused queue again."""

from __future__ import annotations

import argparse

from relay_queue import store
from relay_queue.cli import queues
from relay_queue.cli.base import Output, add_json

HELP = "Claim jobs from a paused queue again."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    queues.add_argument(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Resume the queue; resuming an open one changes nothing."""
    queue = queues.check(options.queue)
    with store.transaction() as tx:
        store.resume(tx, queue)
    out.data({"queue": queue, "paused": False})
    out.line(f"Queue {queue} is open.")
    return 0
