"""The tick: one transaction in which a worker does all its work with the tables.

settle → renew → recover → promote → claim → roll up → COMMIT, and only then does anything start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from relay_queue import store
from relay_queue.exceptions import Unstorable
from relay_queue.store.grant import grant_one
from relay_queue.store.records import Claim, Recovered, Settled, Settlement
from relay_queue.worker import hooks
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
    leases for being over. ``overdrawn`` gives, at that moment too, the leases of ours that ran out
    only while we waited for the writer, and since how many seconds we wait. ``hindrance`` is what
    keeps the worker from its work, for others to read.
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
    hindrance: str = ""
    careful: bool = False
    overdrawn: Callable[[], tuple[Sequence[Held], float]] = lambda: ((), 0.0)


@dataclass(slots=True)
class Done:
    """What one tick has committed.

    ``faults`` has the error of each step that a careful tick left undone, though no row is to blame.
    What was to be told of leases and has no answer was not stored then, and is to be told again.
    """

    now: datetime = field(init=False)
    settlements: Sequence[Settlement] = ()
    answers: list[Settled] = field(default_factory=list)
    renewed: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    recovered: list[Recovered] = field(default_factory=list)
    promoted: int = 0
    asked: int = 0
    claims: list[Claim] = field(default_factory=list)
    faults: dict[str, Exception] = field(default_factory=dict)


SETTLE, RENEW, PROBE, WAKE, CLAIM, COUNT = STEPS = (
    "store outcomes",
    "renew leases",
    "recover jobs",
    "wake jobs",
    "claim jobs",
    "write statistics",
)
"""What the steps of a tick do, in the words of a log line."""


def tick(plan: Plan) -> Done:
    """Do what is planned, in one transaction. Whatever it raises, nothing is done then.

    A careful tick is slower and survives what cannot be stored or read: each outcome, renewal,
    recovery and claim has a savepoint of its own. A job that is proven to be at fault is taken out;
    anything else that cannot be done is left, and the rest goes on. Nobody is rung here: the loop
    does so when it has started what it claimed itself.
    """
    hooks.reach("begin", plan)
    with store.transaction(
        wait_seconds=SLICE_SECONDS, first=True, defer_begin=not plan.careful, rings=False
    ) as tx:
        done = Done(plan.settlements())
        if plan.careful:
            _do_carefully(tx, plan, done)
        else:
            _do(tx, plan, done)
        done.now = tx.now
    hooks.reach("committed", done)
    return done


def tried(plan: Plan, done: Done) -> set[str]:
    """Return the steps for which a tick had anything to do."""
    ages = plan.due and plan.may_expire
    had = {
        SETTLE: done.settlements,
        RENEW: plan.renew,
        PROBE: plan.dead.probes or ages,
        WAKE: plan.due,
        CLAIM: done.asked > 0,
        COUNT: plan.stats is not None,
    }
    return {step for step, work in had.items() if work}


def _renew_overdrawn(tx: store.Transaction, plan: Plan, trial: store.Trial | None = None) -> None:
    """Renew first what we were kept from renewing, so that an outcome in hand passes the guard.

    If somebody has ended such a lease meanwhile, it stays ended, and the outcome is refused.
    """
    overdrawn, waited_seconds = plan.overdrawn()
    leases = [(h.claim.lease_id, h.claim.token, h.claim.lease_seconds) for h in overdrawn]
    renew = partial(store.renew, waited_seconds=waited_seconds)
    if not leases:
        return
    if trial is None:
        renew(tx, leases)
        return
    for lease in leases:
        trial.spare(tx, RENEW, partial(renew, leases=[lease]))


def _do(tx: store.Transaction, plan: Plan, done: Done) -> None:
    _renew_overdrawn(tx, plan)
    done.answers = store.settle(tx, done.settlements)
    hooks.reach("settled", done)
    _renew(tx, plan, done)
    hooks.reach("renewed", done)
    if plan.dead.probes:
        done.recovered = plan.dead.recover(tx)
    if plan.due and plan.may_expire:
        done.recovered += store.recover_expired(tx)
    hooks.reach("recovered", done)
    if plan.due:
        done.promoted = sum(store.promote(tx).values())
    hooks.reach("promoted", done)
    done.claims = _claim(tx, plan, done)
    hooks.reach("claimed", done)
    if plan.stats is not None:
        _count(tx, plan, plan.stats)


def _do_carefully(tx: store.Transaction, plan: Plan, done: Done) -> None:
    trial = store.Trial()
    _renew_overdrawn(tx, plan, trial)
    done.answers = settle_each(tx, trial, done.settlements)
    hooks.reach("settled", done)
    _renew(tx, plan, done, trial)
    if plan.dead.probes:
        done.recovered = trial.spare(tx, PROBE, partial(plan.dead.recover, trial=trial)) or []
    if plan.due:
        if plan.may_expire:
            expire = partial(store.recover_expired, trial=trial)
            done.recovered += trial.spare(tx, PROBE, expire) or []
        woken = trial.spare(tx, WAKE, partial(store.promote, trial=trial))
        done.promoted = sum((woken or {}).values())
    if SETTLE not in trial.faults:  # else what is claimed could only wait for its end, too
        claim = partial(_claim, plan=plan, done=done, trial=trial)
        done.claims = trial.spare(tx, CLAIM, claim) or []
        hooks.reach("claimed", done)
    if plan.stats is not None:
        trial.spare(tx, COUNT, partial(_count, plan=plan, stats=plan.stats))
    done.faults = trial.faults


def _renew(tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None = None) -> None:
    """Extend what is near half of its life and has not been settled a moment ago."""
    settled = {answer.lease_id for answer in done.answers}
    asked = {h.claim.lease_id: h.claim for h in plan.renew if h.claim.lease_id not in settled}
    leases = [(lease_id, c.token, c.lease_seconds) for lease_id, c in asked.items()]
    if trial is None:
        done.renewed = store.renew(tx, leases)
        done.lost = set(asked) - done.renewed
        return
    for lease in leases:
        renewed = trial.spare(tx, RENEW, partial(store.renew, leases=[lease]))
        if renewed is not None:  # else nobody knows whether it is lost, and it runs out in its time
            done.renewed |= renewed
            done.lost |= {lease[0]} - renewed


def _claim(
    tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None = None
) -> list[Claim]:
    done.asked = plan.places()
    if done.asked < 1:
        return []
    return store.claim(
        tx,
        worker_id=plan.worker_id,
        queues=plan.queues,
        limit=done.asked,
        suspects=plan.suspects,
        lease_seconds=plan.lease_seconds,
        backends=plan.backends,
        trial=trial,
    )


def _count(tx: store.Transaction, plan: Plan, stats: Stats) -> None:
    store.roll_up(tx, plan.worker_id, stats.minutes)
    store.heartbeat(tx, plan.worker_id, stats.totals, plan.hindrance)


def settle_each(
    tx: store.Transaction, trial: store.Trial, settlements: Sequence[Settlement]
) -> list[Settled]:
    """Settle each in a savepoint of its own: one that cannot be stored becomes a failed attempt.

    If that cannot be stored either, not the outcome is at fault but the job's own row. What cannot
    be stored for another reason has no answer.
    """
    step = _settling(tx, blame=partial(_settle_unstorable, trial))
    return trial.each(tx, step, settlements)


def _settle_unstorable(
    trial: store.Trial, tx: store.Transaction, told: Settlement, error: Exception
) -> list[Settled]:
    step = _settling(tx, blame=_condemn)
    return trial.each(tx, step, [_unstorable(told, error)])


def _settling(
    tx: store.Transaction,
    blame: Callable[[store.Transaction, Settlement, Exception], Sequence[Settled]],
) -> store.TrialStep[Settlement, Settled]:
    return store.TrialStep(
        SETTLE,
        lambda where, told: store.settle(where, [told]),
        job_of=lambda told: store.job_of_lease(tx, told.lease_id, told.token),
        control=_settle_sound,
        blame=blame,
    )


def _settle_sound(tx: store.Transaction, job_id: int) -> bool:
    """Say whether a sound job can go on, and then succeed."""
    for verb in ("release", "ack"):
        (claim,) = grant_one(tx, job_id, None, None)
        if store.settle(tx, [Settlement(verb, claim.lease_id, claim.token)])[0].reason:
            return False
    return True


def _condemn(tx: store.Transaction, told: Settlement, error: Exception) -> list[Settled]:
    job_id = store.job_of_lease(tx, told.lease_id, told.token)
    if job_id is not None:
        store.mark_unreadable(tx, job_id, error)
    return [Settled(told.lease_id, job_id, "", "", "the job's row cannot be read")]


def _unstorable(told: Settlement, error: Exception) -> Settlement:
    return Settlement(
        "nack",
        told.lease_id,
        told.token,
        error=f"{Unstorable.__module__}.{Unstorable.__qualname__}",
        message=f"Unstorable: the outcome could not be written ({type(error).__name__})",
    )
