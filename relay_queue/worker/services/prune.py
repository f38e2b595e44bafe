"""Delete what the retention settings no longer keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from relay_queue import conf, store
from relay_queue.states import State

Bite = Callable[[store.Transaction, int], int]


class Prune:
    """Deletes old finished jobs, statistics, bulk acts, runs of schedules and stopped workers."""

    def bites(self, settings: conf.RelaySettings) -> Iterator[Bite]:
        """Yield one bite for each kind of row that has a limit."""
        kept = {
            State.SUCCEEDED: settings.retain_succeeded_seconds,
            State.CANCELLED: settings.retain_cancelled_seconds,
            State.DEAD: settings.retain_dead_seconds,
        }
        for state, seconds in kept.items():
            if seconds is not None:
                yield _prune_jobs(state, timedelta(seconds=seconds))
        others = (
            (store.prune_minutes, settings.retain_minutes_seconds),
            (store.prune_bulk_acts, settings.retain_bulk_acts_seconds),
            (store.prune_workers, settings.retain_workers_seconds),
            (store.prune_runs, settings.retain_runs_seconds),
        )
        for prune, seconds in others:
            if seconds is not None:
                yield _prune_others(prune, timedelta(seconds=seconds))


def _prune_jobs(state: State, kept: timedelta) -> Bite:
    def bite(tx: store.Transaction, rows: int) -> int:
        # A bite of a long ledger deletes fewer jobs than it might, and is not the last.
        return rows if store.prune(tx, state, tx.now - kept, rows).more else 0

    return bite


def _prune_others(prune: Callable[..., int], kept: timedelta) -> Bite:
    return lambda tx, rows: prune(tx, tx.now - kept, rows)
