"""The tick: one transaction in which a worker does all its work with the tables.

settle → renew → recover → promote → claim → roll up → COMMIT, and only then does anything start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from relay_queue import store
from relay_queue.exceptions import Unstorable
from relay_queue.store.records import Claim, Recovered, Settled, Settlement
from relay_queue.worker.held import Held
from relay_queue.worker.siblings import DeadSiblings
from relay_queue.worker.stats import Stats

SLICE_SECONDS = 0.25
"""The longest that a tick waits for the writer before the loop looks after its time limits."""


@dataclass(slots=True)
class Plan:
    """What one tick is to do.

    ``settlements`` is asked again once the writer is won: what finished while the tick waited goes
    along in the same commit. ``places`` gives, at that moment, how many jobs to claim. ``due`` says
    that a job may be due or a lease over; most ticks need not ask. ``may_expire`` allows to end
    leases for being over.
    """

    worker_id: int
    settlements: Callable[[], Sequence[Settlement]]
    places: Callable[[], int]
    queues: Sequence[str] = ()
    backends: Sequence[str] | None = None
    lease_seconds: float | None = None
    suspects: int = 1
    renew: Sequence[Held] = ()
    due: bool = True
    may_expire: bool = True
    dead: DeadSiblings = field(default_factory=DeadSiblings)
    stats: Stats | None = None
    careful: bool = False


@dataclass(slots=True)
class Done:
    """What one tick has committed."""

    now: datetime = field(init=False)
    settlements: Sequence[Settlement] = ()
    answers: list[Settled] = field(default_factory=list)
    renewed: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    recovered: list[Recovered] = field(default_factory=list)
    promoted: int = 0
    asked: int = 0
    claims: list[Claim] = field(default_factory=list)


def tick(plan: Plan) -> Done:
    """Do what is planned, in one transaction. Whatever it raises, nothing is done then.

    A careful tick is slower and survives data that cannot be stored or read: each outcome, recovery
    and claim has a savepoint of its own, and the job at fault is taken out. Nobody is rung here: the
    loop does so when it has started what it claimed itself.
    """
    with store.transaction(
        wait_seconds=SLICE_SECONDS, first=True, lazily=not plan.careful, rings=False
    ) as tx:
        done = Done(plan.settlements())
        settle = _settle_one_by_one if plan.careful else store.settle
        done.answers = settle(tx, done.settlements)
        _renew(tx, plan, done)
        _recover(tx, plan, done)
        if plan.due:
            done.promoted = sum(store.promote(tx).values())
        _claim(tx, plan, done)
        if plan.stats is not None:
            store.roll_up(tx, plan.worker_id, plan.stats.minutes)
            store.heartbeat(tx, plan.worker_id, plan.stats.totals)
        done.now = tx.now
    return done


def _renew(tx: store.Transaction, plan: Plan, done: Done) -> None:
    """Extend what is near half of its life and has not been settled a moment ago."""
    settled = {told.lease_id for told in done.settlements}
    asked = {h.claim.lease_id: h.claim for h in plan.renew if h.claim.lease_id not in settled}
    done.renewed = store.renew(
        tx, [(lease_id, c.token, c.lease_seconds) for lease_id, c in asked.items()]
    )
    done.lost = set(asked) - done.renewed


def _recover(tx: store.Transaction, plan: Plan, done: Done) -> None:
    if plan.dead.probes:
        done.recovered = plan.dead.recover(tx, careful=plan.careful)
    if plan.due and plan.may_expire:
        done.recovered += store.recover_expired(tx, careful=plan.careful)


def _claim(tx: store.Transaction, plan: Plan, done: Done) -> None:
    done.asked = plan.places()
    if done.asked > 0:
        done.claims = store.claim(
            tx,
            worker_id=plan.worker_id,
            queues=plan.queues,
            limit=done.asked,
            suspects=plan.suspects,
            lease_seconds=plan.lease_seconds,
            backends=plan.backends,
            careful=plan.careful,
        )


def _settle_one_by_one(tx: store.Transaction, settlements: Sequence[Settlement]) -> list[Settled]:
    """Settle each in a savepoint of its own: one that cannot be stored becomes a failed attempt."""
    return [_settle_alone(tx, told) for told in settlements]


def _settle_alone(tx: store.Transaction, told: Settlement) -> Settled:
    try:
        return _settle_in_savepoint(told)
    except store.UNREADABLE as error:
        store.reraise_unless_data(tx, error)
        first = error
    try:
        return _settle_in_savepoint(_unstorable(told, first))
    except store.UNREADABLE as error:
        store.reraise_unless_data(tx, error)
        # Not the outcome is at fault, but the job's own row.
        job_id = store.condemn_of_lease(tx, told.lease_id, told.token, error)
        return Settled(told.lease_id, job_id, "", "", "the job's row cannot be read")


def _settle_in_savepoint(told: Settlement) -> Settled:
    # A transaction inside the tick's is a savepoint with counters of its own.
    with store.transaction() as tx:
        return store.settle(tx, [told])[0]


def _unstorable(told: Settlement, error: Exception) -> Settlement:
    return Settlement(
        "nack",
        told.lease_id,
        told.token,
        error=f"{Unstorable.__module__}.{Unstorable.__qualname__}",
        message=f"Unstorable: the outcome could not be written ({type(error).__name__})",
    )
