"""``relay discard``: delete dead letters."""

from __future__ import annotations

import argparse
from typing import Final

from relay_queue import store
from relay_queue.cli import selection
from relay_queue.cli.base import Output, add_json
from relay_queue.states import State

HELP = (
    "Delete dead letters with their ledger for good, by id or by filters. Exits with 1 if a job "
    "that was named is not there or is not dead."
)

STATES: Final = (State.DEAD,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    selection.add_arguments(parser, STATES)


def run(options: argparse.Namespace, out: Output) -> int:
    """Discard the selected jobs."""
    job_ids, named = selection.select(options, STATES, "discard")
    tally = selection.change(job_ids, store.discard)
    return selection.show(tally, named, "Discarded", out)
