"""``relay priority``: change the priority of jobs that wait."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from relay_queue import store
from relay_queue.cli import selection
from relay_queue.cli.base import Output, add_json
from relay_queue.ranking import MAX_PRIORITY, MIN_PRIORITY
from relay_queue.states import State

HELP = (
    "Change the priority of jobs that wait, by id or by filters. The time that they have waited "
    "goes on counting. Exits with 1 if a job that was named is not there, runs, or has finished."
)

STATES: Final = (State.SCHEDULED, State.READY, State.RETRYING)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    selection.add_arguments(parser, STATES)
    parser.add_argument(
        "--to",
        metavar="N",
        type=int,
        required=True,
        help=f"The new priority, {MIN_PRIORITY} to {MAX_PRIORITY}; higher goes first.",
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Change the priority of the selected jobs."""

    def verb(tx: store.Transaction, job_ids: Sequence[int]) -> store.Changed:
        return store.set_priority(tx, job_ids, options.to)

    job_ids, named = selection.select(options, STATES, f"give priority {options.to} to")
    tally = selection.change(job_ids, verb)
    return selection.show(tally, named, f"Gave priority {options.to} to", out)
