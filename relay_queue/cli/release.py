"""``relay release``: take running jobs from their workers."""

from __future__ import annotations

import argparse
from typing import Final

from relay_queue import store
from relay_queue.cli import selection
from relay_queue.cli.base import Output, add_json
from relay_queue.states import State

HELP = (
    "End the leases of running jobs and make the jobs ready again, uncharged, by id or by filters. "
    "Their functions are told, but may go on for a while: the next attempt can overlap with them. "
    "Exits with 1 if a job that was named is not there or does not run."
)

STATES: Final = (State.RUNNING,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    selection.add_arguments(parser, STATES)


def run(options: argparse.Namespace, out: Output) -> int:
    """Release the leases of the selected jobs."""
    job_ids, named = selection.select(options, STATES, "release")
    tally = selection.change(job_ids, store.release_leases)
    return selection.show(tally, named, "Released", out)
