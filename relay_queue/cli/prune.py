"""``relay prune``: delete old finished jobs."""

from __future__ import annotations

import argparse
from datetime import datetime, timedelta
from typing import Final

from relay_queue import conf, store
from relay_queue.cli.base import Output, add_json, duration
from relay_queue.query import looks
from relay_queue.states import State
from relay_queue.store.operate import BATCH

HELP = (
    "Delete finished jobs with their ledger, at most a thousand a transaction. Without arguments, "
    "what the RETAIN_ settings no longer keep, old statistics, bulk acts and stopped workers included. Dead "
    "letters go only with --state dead or a setting."
)

STATES: Final = (State.SUCCEEDED, State.CANCELLED, State.DEAD)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        type=duration,
        help="Finished longer ago than 7d, 12h, 30m or 45s; default: the RETAIN_ setting.",
    )
    parser.add_argument(
        "--state",
        action="append",
        choices=[state.value for state in STATES],
        help="Only jobs in this state; may be given several times.",
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Prune, and show how many rows were deleted."""
    now = looks.now()
    deleted: dict[str, int] = {}
    for state, seconds in _ages(options.state, options.older_than).items():
        deleted[state.value] = _prune_jobs(state, now - timedelta(seconds=seconds))
    if options.state is None:
        deleted |= _prune_the_rest(now)
    out.data({"deleted": deleted})
    if not deleted:
        out.line("Nothing is to be deleted: the settings keep these for ever. Name --older-than.")
    for name, n in deleted.items():
        out.line(f"{name}: {n:,} deleted")
    return 0


def _ages(states: list[str] | None, older_than: float | None) -> dict[State, float]:
    """Return the age in seconds from which jobs of each state are deleted."""
    settings = conf.get()
    ages = {
        State.SUCCEEDED: settings.retain_succeeded_seconds,
        State.CANCELLED: settings.retain_cancelled_seconds,
        State.DEAD: settings.retain_dead_seconds,
    }
    if states is not None:
        ages = {State(name): ages[State(name)] for name in states}
    if older_than is not None:
        # Dead letters that are kept for ever are deleted only if they are named.
        ages = {
            state: older_than
            for state, kept in ages.items()
            if states is not None or kept is not None
        }
    return {state: seconds for state, seconds in ages.items() if seconds is not None}


def _prune_jobs(state: State, before: datetime) -> int:
    total = 0
    while True:
        with store.transaction() as tx:
            pruned = store.prune(tx, state, before, BATCH)
        total += pruned.jobs
        if not pruned.more:
            return total


def _prune_the_rest(now: datetime) -> dict[str, int]:
    """Delete rows of stopped workers, statistics and bulk acts that the settings no longer keep."""
    settings = conf.get()
    rest = {
        "workers": (store.prune_workers, settings.retain_workers_seconds),
        "minutes": (store.prune_minutes, settings.retain_minutes_seconds),
        "bulk_acts": (store.prune_bulk_acts, settings.retain_bulk_acts_seconds),
    }
    deleted = {}
    for name, (verb, seconds) in rest.items():
        if seconds is None:
            continue
        deleted[name], n = 0, BATCH
        while n == BATCH:
            with store.transaction() as tx:
                n = verb(tx, now - timedelta(seconds=seconds), BATCH)
            deleted[name] += n
    return deleted
