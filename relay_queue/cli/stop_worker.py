"""``relay stop-worker``: end worker processes."""

from __future__ import annotations

import argparse

from relay_queue.cli import workers
from relay_queue.cli.base import Output
from relay_queue.models import WorkerOrder

HELP = (
    "Tell worker processes to end as after SIGTERM: they claim nothing more, finish what they run "
    "within their shutdown timeout, and hand back the rest. Their supervisor does not replace them, "
    "and ends with the last of them. Exits with 1 if one of them has ended, or was told to stop, "
    "already."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    workers.add_arguments(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Tell the workers."""
    return workers.tell(options, WorkerOrder.STOP, "Told to stop", out)
