"""The tick: one transaction in which a worker does all its work with the tables.

settle → renew → services (recover, promote) → claim → roll up → COMMIT, and only then does anything
start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from relay_queue import store
from relay_queue.exceptions import Unstorable
from relay_queue.logs import get_logger
from relay_queue.store.grant import grant_one
from relay_queue.store.records import Claim, Settled, Settlement
from relay_queue.store.settle import goes_to
from relay_queue.store.trial import sound_job
from relay_queue.worker.database import SLICE_SECONDS
from relay_queue.worker.plan import CLAIM, COUNT, RENEW, SETTLE, Done, Plan, reach
from relay_queue.worker.services import IN_TICK
from relay_queue.worker.stats import Stats

logger = get_logger("relay_queue.worker")


def tick(plan: Plan) -> Done:
    """Do what is planned, in one transaction. Whatever it raises, nothing is done then.

    A careful tick is slower and survives what cannot be stored or read: each outcome, renewal,
    service and claim has a savepoint of its own. A job that is proven to be at fault is taken out;
    anything else that cannot be done is left, and the rest goes on. No worker is rung here: the
    loop does so when it has started what it claimed itself.
    """
    reach("begin", plan)
    with store.transaction(
        wait_seconds=SLICE_SECONDS, first=True, defer_begin=not plan.careful, rings=False
    ) as tx:
        done = Done(plan.settlements())
        trial = store.Trial() if plan.careful else None
        _do(tx, plan, done, trial)
        done.now = tx.now
    reach("committed", done)
    return done


def _do(tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None) -> None:
    _renew_overdrawn(tx, plan, trial)
    if trial is None:
        done.answers = store.settle(tx, done.settlements)
    else:
        done.answers = settle_each(tx, trial, done.settlements)
    reach("settled", done)
    _renew(tx, plan, done, trial)
    reach("renewed", done)
    _serve(tx, plan, done, trial)
    if trial is None:
        done.claims = _claim(tx, plan, done)
    elif SETTLE not in trial.faults:  # else what is claimed could only wait for its end, too
        claim = partial(_claim, plan=plan, done=done, trial=trial)
        done.claims = trial.spare(tx, CLAIM, claim) or []
    reach("claimed", done)
    if plan.stats is not None:
        count = partial(_count, plan=plan, stats=plan.stats)
        count(tx) if trial is None else trial.spare(tx, COUNT, count)
    if trial is not None:
        done.faults = trial.faults


def _serve(tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None) -> None:
    """Run the services that have anything to do."""
    for service in IN_TICK:
        if service.due(plan):
            done.tried.add(service.step)
            if trial is None:
                done.moved += service.serve(tx, plan, done, None)
            else:
                # Counted apart: what the end of the savepoint undoes has not been done.
                part = Done()
                serve = partial(service.serve, plan=plan, done=part, trial=trial)
                moved = trial.spare(tx, service.step, serve)
                if moved is not None:
                    done.moved += moved
                    done.recovered += part.recovered
                    done.promoted += part.promoted
        if service.point is not None:
            reach(service.point, done)


def passed(plan: Plan, done: Done) -> set[str]:
    """Return the steps of a committed tick that could be done, or had nothing left to do.

    A tick takes every outcome and every renewal that is due. Claims and services come only now and
    then, so of these a tick that had none says nothing.
    """
    steps = {SETTLE, RENEW} | done.tried
    if done.asked > 0:
        steps.add(CLAIM)
    if plan.stats is not None:
        steps.add(COUNT)
    return steps - done.faults.keys()


def _renew_overdrawn(tx: store.Transaction, plan: Plan, trial: store.Trial | None) -> None:
    """Renew first what the writer kept us from renewing, so that an outcome in hand passes the
    guard.

    If another worker has ended such a lease meanwhile, it stays ended, and the outcome is refused.
    """
    overdrawn, waited_seconds = plan.overdrawn()
    leases = [(a.claim.lease_id, a.claim.token, a.claim.lease_seconds) for a in overdrawn]
    renew = partial(store.renew, waited_seconds=waited_seconds)
    if not leases:
        return
    if trial is None:
        renew(tx, leases)
        return
    for lease in leases:
        trial.spare(tx, RENEW, partial(renew, leases=[lease]))


def _renew(tx: store.Transaction, plan: Plan, done: Done, trial: store.Trial | None) -> None:
    """Extend what is near half of its life and has not been settled a moment ago."""
    if not plan.renew:
        return
    settled = {answer.lease_id for answer in done.answers}
    asked = {a.claim.lease_id: a.claim for a in plan.renew if a.claim.lease_id not in settled}
    leases = [(lease_id, c.token, c.lease_seconds) for lease_id, c in asked.items()]
    if trial is None:
        done.renewed = store.renew(tx, leases)
        done.lost = set(asked) - done.renewed
        return
    for lease in leases:
        renewed = trial.spare(tx, RENEW, partial(store.renew, leases=[lease]))
        if renewed is not None:  # else it may be lost or not, and it expires in its time
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
    here = store.heartbeat(tx, plan.worker_id, stats.totals, plan.hindrance)
    if not here and plan.registered is not None:
        # Else nobody could see that this worker lives, prove it dead, or give it an order.
        logger.warning(
            "The row of this worker, %d, was deleted; registering again.", plan.worker_id
        )
        store.register_again(tx, plan.worker_id, plan.registered, plan.order)


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
    trial: store.Trial, tx: store.Transaction, settlement: Settlement, error: Exception
) -> list[Settled]:
    step = _settling(tx, blame=_mark_unreadable)
    return trial.each(tx, step, [_unstorable(settlement, error)])


def _settling(
    tx: store.Transaction,
    blame: Callable[[store.Transaction, Settlement, Exception], Sequence[Settled]],
) -> store.TrialStep[Settlement, Settled]:
    def job_of(settlement: Settlement) -> int | None:
        return store.job_of_lease(tx, settlement.lease_id, settlement.token)

    return store.TrialStep(
        SETTLE,
        lambda where, settlement: store.settle(where, [settlement]),
        job_of=job_of,
        control=_settle_sound,
        goes_to=lambda where, settlement: goes_to(where, settlement, job_of(settlement) or 0),
        blame=blame,
    )


def _settle_sound(tx: store.Transaction, queue: str, item: Settlement) -> bool:
    """Say whether sound jobs of a queue can go the way that an outcome would send its job.

    For a failure those are two: a job with attempts left backs off, and one without goes dead.
    """
    for max_attempts in (1, 2):
        job_id = sound_job(tx, queue, max_attempts)
        (claim,) = grant_one(tx, job_id, None, None)
        same = claim.settlement(
            item.verb,
            fatal=item.fatal,
            timed_out=item.timed_out,
            delay_seconds=item.delay_seconds,
            death_logged=True,
        )
        if store.settle(tx, [same])[0].reason:
            return False
    return True


def _mark_unreadable(
    tx: store.Transaction, settlement: Settlement, error: Exception
) -> list[Settled]:
    job_id = store.job_of_lease(tx, settlement.lease_id, settlement.token)
    if job_id is not None:
        store.mark_unreadable(tx, job_id, error)
    return [Settled(settlement.lease_id, job_id, "", "", "the job's row cannot be read")]


def _unstorable(settlement: Settlement, error: Exception) -> Settlement:
    return Settlement(
        "nack",
        settlement.lease_id,
        settlement.token,
        error=f"{Unstorable.__module__}.{Unstorable.__qualname__}",
        message=f"Unstorable: the outcome could not be written ({type(error).__name__})",
    )
