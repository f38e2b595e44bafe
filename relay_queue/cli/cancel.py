"""``relay cancel``: cancel unfinished jobs."""

from __future__ import annotations

import argparse
from typing import Final

from relay_queue import store
from relay_queue.cli import selection
from relay_queue.cli.base import Output, add_json
from relay_queue.states import CANCELLABLE, State

HELP = (
    "Cancel unfinished jobs at once, by id or by filters. A job that runs loses its lease: its "
    "function is told, and a late result is refused. Exits with 1 if a job that was named is not "
    "there or finished already."
)

STATES: Final = tuple(state for state in State if state in CANCELLABLE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    selection.add_arguments(parser, STATES)


def run(options: argparse.Namespace, out: Output) -> int:
    """Cancel the selected jobs."""
    job_ids, named = selection.select(options, STATES, "cancel")
    tally = selection.change(job_ids, store.cancel)
    return selection.show(tally, named, "Cancelled", out)
