"""End the leases of workers that are proven dead, and those whose time is over."""

from __future__ import annotations

from relay_queue import store
from relay_queue.worker.plan import RECOVER, Done, Plan, Point


class RecoverDead:
    """Ends the leases of workers that a probe has proven dead."""

    step: str = RECOVER
    point: Point | None = None

    def due(self, plan: Plan) -> bool:
        """Say whether a worker is proven dead whose leases have not been ended."""
        return bool(plan.dead.probes)

    def serve(
        self, tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None
    ) -> int:
        """End some of their leases; the rest is for the next ticks."""
        ended = plan.dead.recover(tx, trial=trial)
        done.recovered += ended
        return len(ended)


class RecoverExpired:
    """Ends the leases whose time is over."""

    step: str = RECOVER
    point: Point | None = "recovered"

    def due(self, plan: Plan) -> bool:
        """Say whether a lease may be over, and this worker may end it for that."""
        return plan.due and plan.may_expire

    def serve(
        self, tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None
    ) -> int:
        """End some of the leases that are over."""
        ended = store.recover_expired(tx, trial=trial)
        done.recovered += ended
        return len(ended)
