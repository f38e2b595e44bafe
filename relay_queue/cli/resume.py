"""``relay resume``: claim from a paused queue again."""

from __future__ import annotations

import argparse

from relay_queue import conf, store
from relay_queue.cli import queues
from relay_queue.cli.base import Output, add_json
from relay_queue.wakeup import ring_on_commit

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
        ring_on_commit(conf.get().database)
    out.data({"queue": queue, "paused": False})
    out.line(f"Queue {queue} is open.")
    return 0
