"""Fire the schedules whose slots have come."""

from __future__ import annotations

from relay_queue import store
from relay_queue.worker.plan import FIRE, Done, Plan, Point


class Fire:
    """Enqueues the jobs of schedules; any worker does it, in its tick."""

    step: str = FIRE
    point: Point | None = "fired"

    def due(self, plan: Plan) -> bool:
        """Say whether the next slot of a schedule may have come."""
        return plan.due

    def serve(
        self, tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None
    ) -> int:
        """Fire some of the schedules; the rest is for the next ticks."""
        return store.fire_schedules(tx)
