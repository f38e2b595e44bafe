"""What an operator may do: cancel, requeue, discard, run now, change priority, take leases back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relay_queue import store
from relay_queue.exceptions import InvalidJob, InvalidTransition, JobNotFound, QueueFull
from relay_queue.models import Job, Lease
from relay_queue.operations import CANCEL, REQUEUE
from relay_queue.states import State
from tests.store.actions import (
    START,
    Wall,
    ack,
    after,
    assert_counters_exact,
    cancel,
    claim,
    claim_one,
    claimed_ids,
    do,
    enqueue,
    enqueue_each,
    nack,
    nothing_written,
    outcomes,
    read,
    rolled_back,
    rows,
    snooze,
    state,
)

pytestmark = pytest.mark.usefixtures("wall")


def make(name: str) -> int:
    """Bring one job into a state and return its id. Ready ones are left in another queue."""
    if name == State.SCHEDULED:
        return enqueue(run_after=after(3600))
    if name == State.READY:
        return enqueue(queue="waiting")
    job_id = enqueue()
    held = claim_one()
    assert held.job_id == job_id
    endings: dict[str, Callable[[], Any]] = {
        State.RUNNING: lambda: None,
        State.RETRYING: lambda: nack(held),
        State.SUCCEEDED: lambda: ack(held),
        State.DEAD: lambda: nack(held, fatal=True),
        State.CANCELLED: lambda: cancel(job_id),
    }
    endings[name]()
    assert state(job_id) == name
    return job_id


VERBS: dict[str, tuple[Callable[..., store.Changed], dict[str, str | None]]] = {
    "cancel": (
        store.cancel,
        dict.fromkeys(("scheduled", "ready", "running", "retrying"), "cancelled"),
    ),
    "requeue": (store.requeue, dict.fromkeys(("dead", "cancelled"), "ready")),
    "discard": (store.discard, {"dead": None}),
    "run_now": (store.run_now, dict.fromkeys(("scheduled", "retrying"), "ready")),
    "release_leases": (store.release_leases, {"running": "ready"}),
    "set_priority": (
        lambda tx, ids: store.set_priority(tx, ids, 5),
        {"scheduled": "scheduled", "ready": "ready", "retrying": "retrying"},
    ),
}


@pytest.mark.parametrize("before", [s.value for s in State])
@pytest.mark.parametrize("name", VERBS)
def test_each_verb_changes_the_states_it_may_and_skips_the_others_by_name(
    name: str, before: str, wall: Wall
) -> None:
    verb, moves = VERBS[name]
    job_id = make(before)
    wall.advance(1)
    if before not in moves:
        with nothing_written():
            assert do(verb, [job_id]) == store.Changed([], {job_id: before})
        return
    assert do(verb, [job_id]) == store.Changed([job_id], {})
    remaining = rows(Job).filter(pk=job_id).values_list("state", flat=True).first()
    assert remaining == moves[before]
    assert_counters_exact()
    assert rows(Lease).filter(ended_at=None).count() == 0


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_takes_many_jobs_and_unknown_ones_vanish(name: str, wall: Wall) -> None:
    verb, moves = VERBS[name]
    ids = {s.value: make(s.value) for s in State}
    changed = do(verb, [*ids.values(), 10**9, *ids.values()])
    assert sorted(changed.job_ids) == sorted(ids[s] for s in moves)
    assert changed.skipped == {ids[s]: s for s in ids if s not in moves}
    assert_counters_exact()


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_with_no_jobs_does_nothing(name: str) -> None:
    with nothing_written():
        assert do(VERBS[name][0], []) == store.Changed()


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_refuses_more_jobs_than_one_transaction_should_touch(name: str) -> None:
    with nothing_written(), pytest.raises(ValueError, match="1000"):
        do(VERBS[name][0], list(range(1, 1002)))
    do(VERBS[name][0], list(range(1, 1001)))


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_that_is_rolled_back_changes_nothing(name: str) -> None:
    ids = [make(s.value) for s in State]
    with nothing_written(), rolled_back() as tx:
        VERBS[name][0](tx, ids)


# --- cancel ------------------------------------------------------------------------------------


def test_cancelling_a_running_job_voids_its_token_at_once(wall: Wall) -> None:
    job_id = enqueue()
    held = claim_one()
    wall.advance(1)
    cancel(job_id)
    stored = read(job_id)
    assert (stored.state, stored.finished_at, stored.attempt) == ("cancelled", after(1), 1)
    assert outcomes(job_id) == ["cancelled"]
    assert do(store.renew, [(held.lease_id, held.token, 60.0)]) == set()
    assert not ack(held).accepted


def test_cancelling_a_job_touches_no_other_lease() -> None:
    enqueue_each(2)
    one, two = claim(2)
    cancel(one.job_id)
    assert ack(two).accepted


def test_cancelling_twice_is_an_invalid_transition() -> None:
    job_id = enqueue()
    cancel(job_id)
    with nothing_written(), pytest.raises(InvalidTransition) as refused:
        cancel(job_id)
    assert (refused.value.from_state, refused.value.job_id) == ("cancelled", job_id)


def test_a_succeeded_job_can_neither_be_cancelled_nor_requeued() -> None:
    job_id = make("succeeded")
    for verb in (CANCEL.change_one, REQUEUE.change_one):
        with nothing_written(), pytest.raises(InvalidTransition):
            do(verb, job_id)


@pytest.mark.parametrize("verb", [CANCEL.change_one, REQUEUE.change_one])
def test_a_verb_on_an_unknown_job_says_so(verb: Callable[..., None]) -> None:
    with nothing_written(), pytest.raises(JobNotFound, match="no job 77"):
        do(verb, 77)


# --- requeue -----------------------------------------------------------------------------------


def test_a_requeued_job_has_a_fresh_budget_while_the_numbers_go_on(wall: Wall) -> None:
    job_id = enqueue(max_attempts=2)
    for _ in range(2):
        nack(claim_one(), delay_seconds=0)
        do(store.promote)
    assert state(job_id) == "dead"
    wall.advance(100)
    do(REQUEUE.change_one, job_id)
    stored = read(job_id)
    assert (stored.state, stored.attempt, stored.attempt_base) == ("ready", 2, 2)
    assert (stored.available_at, stored.finished_at, stored.losses) == (wall.now, None, 0)
    held = claim_one()
    assert (held.attempt, held.attempts_left) == (3, 1)
    assert nack(held, delay_seconds=0).state == "retrying"
    do(store.promote)
    assert nack(claim_one()).state == "dead"
    assert read(job_id).attempt == 4
    assert_counters_exact()


def test_back_off_begins_again_after_a_requeue(wall: Wall) -> None:
    job_id = enqueue(max_attempts=3)
    for _ in range(3):
        nack(claim_one(), delay_seconds=0)
        do(store.promote)
    do(REQUEUE.change_one, job_id)
    nack(claim_one())
    assert read(job_id).available_at == after(1)


def test_a_requeued_job_takes_a_new_place_behind_those_who_wait(wall: Wall) -> None:
    job_id = make("dead")
    wall.advance(1)
    waiting = enqueue()
    wall.advance(1)
    do(REQUEUE.change_one, job_id)
    assert claimed_ids(2) == [waiting, job_id]


def test_a_requeue_respects_the_capacity_and_changes_none_when_not_all_fit() -> None:
    dead = [make("dead") for _ in range(2)]
    do(store.set_limits, "default", capacity=2, max_running=None)
    enqueue()
    with nothing_written(), pytest.raises(QueueFull):
        do(store.requeue, dead)
    do(REQUEUE.change_one, dead[0])
    with nothing_written(), pytest.raises(QueueFull):
        do(REQUEUE.change_one, dead[1])


def test_a_job_cancelled_on_its_last_attempt_gets_a_fresh_budget() -> None:
    job_id = enqueue(max_attempts=1)
    claim_one()
    cancel(job_id)
    do(REQUEUE.change_one, job_id)
    assert (claim_one().attempt, read(job_id).attempt_base) == (2, 1)


# --- run now, priority, leases -----------------------------------------------------------------


def test_run_now_keeps_the_budget_and_takes_a_place_as_of_now(wall: Wall) -> None:
    job_id = enqueue(max_attempts=3)
    nack(claim_one(), delay_seconds=3600)
    waiting = enqueue()
    wall.advance(1)
    do(store.run_now, [job_id])
    stored = read(job_id)
    assert (stored.available_at, stored.attempt, stored.attempt_base) == (wall.now, 1, 0)
    assert claimed_ids(2) == [waiting, job_id]


def test_a_new_priority_keeps_the_time_already_waited(wall: Wall) -> None:
    low = enqueue()
    wall.advance(30)
    high = enqueue(priority=1)
    do(store.set_priority, [low], 1)
    assert (read(low).priority, read(low).available_at) == (1, START)
    assert claimed_ids(2) == [low, high]


@pytest.mark.parametrize("priority", [101, -101, 1.5, "1", None, True])
def test_a_priority_out_of_bounds_is_refused(priority: Any) -> None:
    job_id = enqueue()
    with nothing_written(), pytest.raises(InvalidJob, match="priority"):
        do(store.set_priority, [job_id], priority)


def test_a_priority_too_big_to_print_is_refused() -> None:
    with pytest.raises(InvalidJob, match="priority"):
        do(store.set_priority, [enqueue()], 10**5000)


def test_a_lease_taken_back_is_uncharged_and_its_owner_is_refused(wall: Wall) -> None:
    job_id = enqueue(max_attempts=1)
    held = claim_one()
    before = read(job_id)
    do(store.release_leases, [job_id])
    stored = read(job_id)
    assert (stored.state, stored.attempt, stored.rank) == ("ready", 0, before.rank)
    assert outcomes(job_id) == ["released"]
    assert not ack(held).accepted
    assert claim_one().attempt == 1


def test_taking_back_the_lease_of_a_damaged_job_does_no_harm() -> None:
    job_id = enqueue()
    claim_one()
    rows(Lease).all().delete()
    with nothing_written():
        do(store.release_leases, [job_id])


def test_a_snoozed_job_can_be_cancelled_while_it_waits() -> None:
    job_id = enqueue()
    snooze(claim_one(), 10)
    cancel(job_id)
    assert outcomes(job_id) == ["snoozed"]


def test_discarding_deletes_the_ledger_with_the_job() -> None:
    job_id = make("dead")
    keep = make("dead")
    do(store.discard, [job_id])
    assert not rows(Job).filter(pk=job_id).exists()
    assert not rows(Lease).filter(job_id=job_id).exists()
    assert outcomes(keep) == ["fatal"]


def test_a_discarded_job_frees_its_key() -> None:
    job_id = enqueue(idempotency_key="k")
    nack(claim_one(), fatal=True)
    do(store.discard, [job_id])
    assert enqueue(idempotency_key="k") != job_id
