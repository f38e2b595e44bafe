"""``relay prune``: delete old finished jobs."""

from __future__ import annotations

import argparse
from datetime import datetime, timedelta
from typing import Final

from relay_queue import conf, store
from relay_queue.cli.base import Output, add_json, duration
from relay_queue.query import looks, prunable
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
        type=_age,
        help="Finished longer ago than 7d, 12h, 30m or 45s; default: the RETAIN_ setting.",
    )
    parser.add_argument(
        "--state",
        action="append",
        choices=[state.value for state in STATES],
        help="Only jobs in this state; may be given several times.",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="Show how many rows would go, and delete nothing."
    )


def _age(text: str) -> float:
    seconds = duration(text)
    if not text.strip()[-1].isalpha():
        # Whoever types 30 mostly means days, and what is deleted does not come back.
        n = text.strip()
        raise argparse.ArgumentTypeError(
            f"{text!r} does not name its unit. Write {n}d, {n}h, {n}m or {n}s."
        )
    return seconds


def run(options: argparse.Namespace, out: Output) -> int:
    """Prune, and show how many rows were deleted, or would be."""
    now = looks.now()
    chosen = _ages(options.state, options.older_than)
    ages = {state.value: seconds for state, seconds in chosen.items()}
    if options.state is None:
        ages |= _other_ages()
    act = prunable.count if options.dry_run else _delete
    rows = {name: act(name, now - timedelta(seconds=seconds)) for name, seconds in ages.items()}
    out.data({"would_delete" if options.dry_run else "deleted": rows})
    if not rows:
        out.line("Nothing is to be deleted: the settings keep these for ever. Name --older-than.")
    words = "would be deleted" if options.dry_run else "deleted"
    for name, n in rows.items():
        out.line(f"{name}: {n:,} {words}")
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


def _other_ages() -> dict[str, float]:
    """Return the same for rows of stopped workers, statistics and bulk acts."""
    settings = conf.get()
    ages = {
        "workers": settings.retain_workers_seconds,
        "minutes": settings.retain_minutes_seconds,
        "bulk_acts": settings.retain_bulk_acts_seconds,
    }
    return {name: seconds for name, seconds in ages.items() if seconds is not None}


_OTHERS: Final = {
    "workers": store.prune_workers,
    "minutes": store.prune_minutes,
    "bulk_acts": store.prune_bulk_acts,
}


def _delete(name: str, before: datetime) -> int:
    """Delete all old rows of a kind, in bounded bites; return how many."""
    total, more = 0, True
    while more:
        with store.transaction() as tx:
            if name in _OTHERS:
                n = _OTHERS[name](tx, before, BATCH)
                more = n == BATCH
            else:
                n, more = store.prune(tx, State(name), before, BATCH)
        total += n
    return total
