"""``relay run-now``: make waiting jobs ready before their time."""

from __future__ import annotations

import argparse
from typing import Final

from relay_queue import store
from relay_queue.cli import selection
from relay_queue.cli.base import Output, add_json
from relay_queue.states import State

HELP = (
    "Make jobs ready that are scheduled for later or wait for their next attempt, by id or by "
    "filters. Their budget of attempts stays as it is. Exits with 1 if a job that was named is not "
    "there or does not wait."
)

STATES: Final = (State.SCHEDULED, State.RETRYING)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    selection.add_arguments(parser, STATES)


def run(options: argparse.Namespace, out: Output) -> int:
    """Make the selected jobs ready."""
    job_ids, named = selection.select(options, STATES, "run now")
    tally = selection.change(job_ids, store.run_now)
    return selection.show(tally, named, "Made ready", out)
