"""``relay requeue``: put dead or cancelled jobs back to ready."""

from __future__ import annotations

import argparse
from typing import Final

from django.core.management.base import CommandError

from relay_queue import store
from relay_queue.cli import selection
from relay_queue.cli.base import Output, add_json
from relay_queue.states import State

HELP = (
    "Put dead or cancelled jobs back to ready with a fresh budget of attempts, by id or by "
    "filters. Exits with 1 if a job that was named is not there or in another state."
)

STATES: Final = (State.DEAD, State.CANCELLED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    selection.add_arguments(parser, STATES)
    parser.add_argument(
        "--all-dead", action="store_true", help="All dead letters: the same as --state dead."
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Requeue the selected jobs."""
    if options.all_dead:
        if options.state and options.state != ["dead"]:
            raise CommandError("Give --all-dead or --state, not both.")
        options.state = [State.DEAD.value]
    job_ids, named = selection.select(options, STATES, "requeue")
    tally = selection.change(job_ids, store.requeue)
    return selection.show(tally, named, "Requeued", out)
