"""Make the jobs ready that are due: scheduled ones, and those whose back-off is over."""

from __future__ import annotations

from relay_queue import store
from relay_queue.worker.plan import PROMOTE, Done, Plan, Point


class Promote:
    """Moves jobs that are due to ready."""

    step: str = PROMOTE
    point: Point | None = "promoted"

    def due(self, plan: Plan) -> bool:
        """Say whether a job may be due."""
        return plan.due

    def serve(
        self, tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None
    ) -> int:
        """Make some of the jobs ready that are due."""
        done.promoted = sum(store.promote(tx, trial=trial).values())
        return done.promoted
