"""``relay quiet``: let workers claim nothing more."""

from __future__ import annotations

import argparse

from relay_queue.cli import workers
from relay_queue.cli.base import Output
from relay_queue.models import WorkerOrder

HELP = (
    "Tell workers to claim nothing more. They finish what they run and stay. Exits with 1 if one "
    "of them has ended, or was told to stop, already."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    workers.add_arguments(parser)
    parser.add_argument("--undo", action="store_true", help="Let them claim again.")


def run(options: argparse.Namespace, out: Output) -> int:
    """Tell the workers."""
    if options.undo:
        return workers.tell(options, None, "Told to claim again", out)
    return workers.tell(options, WorkerOrder.QUIET, "Told to claim nothing more", out)
