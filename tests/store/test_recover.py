"""Recover and promote: what happens to jobs whose owner, or whose waiting time, is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relay_queue import store
from relay_queue.models import Job, Lease
from tests.store.actions import (
    Wall,
    ack,
    after,
    assert_counters_exact,
    cancel,
    claim,
    claim_one,
    claimed_ids,
    counted,
    do,
    enqueue,
    enqueue_each,
    kill,
    lose,
    nack,
    nothing_written,
    outcomes,
    read,
    read_lease,
    register,
    rolled_back,
    rows,
    state,
)

pytestmark = pytest.mark.usefixtures("wall")


def test_a_lease_is_recovered_when_its_time_is_over_and_not_before(wall: Wall) -> None:
    job_id = enqueue()
    held = claim_one()
    wall.advance(59.999999)
    with nothing_written():
        assert do(store.recover_expired) == []
    wall.advance(0.000001)
    assert do(store.recover_expired) == [
        store.Recovered(held.lease_id, job_id, "default", "expired", "ready")
    ]
    lease = read_lease(held.lease_id)
    assert (lease.outcome, lease.ended_at) == ("expired", after(60))
    assert_counters_exact()


def test_a_renewed_lease_is_not_recovered_at_its_first_end(wall: Wall) -> None:
    enqueue()
    held = claim_one()
    wall.advance(30)
    do(store.renew, [(held.lease_id, held.token, 60.0)])
    wall.advance(59)
    assert do(store.recover_expired) == []


def test_a_first_loss_goes_back_ready_at_once_with_its_place_and_the_attempt_charged(
    wall: Wall,
) -> None:
    first = enqueue(max_attempts=5)
    second = enqueue()
    before = read(first)
    held = claim_one(worker_id=register())
    wall.advance(1)
    assert kill(held).state == "ready"
    stored = read(first)
    assert (stored.rank, stored.available_at) == (before.rank, before.available_at)
    assert (stored.attempt, stored.losses, stored.finished_at) == (1, 1, None)
    assert "effect of this attempt is unknown" in stored.last_error
    assert claimed_ids(2) == [first, second]
    assert outcomes(first) == ["lost", None]
    assert_counters_exact()


@pytest.mark.parametrize("second", ["lost", "expired"])
def test_from_the_second_loss_in_a_row_the_job_waits_with_jitter(second: str, wall: Wall) -> None:
    ids = enqueue_each(30, max_attempts=5)
    worker_id = register()
    claim(30, worker_id=worker_id)
    do(store.recover_dead, [worker_id])
    claim(30, worker_id=worker_id)
    if second == "lost":
        recovered = do(store.recover_dead, [worker_id])
    else:
        wall.advance(60)
        recovered = do(store.recover_expired)
    assert {r.state for r in recovered} == {"retrying"}
    waits = {(read(job_id).available_at - wall.now).total_seconds() for job_id in ids}
    assert len(waits) > 15, "full jitter spreads those that died together"
    assert all(0 <= wait <= 2 for wait in waits)
    assert {read(job_id).losses for job_id in ids} == {2}
    assert_counters_exact()


def test_a_loss_with_no_attempt_left_is_a_dead_letter(wall: Wall) -> None:
    job_id = enqueue(max_attempts=1)
    held = claim_one(worker_id=register())
    assert kill(held).state == "dead"
    stored = read(job_id)
    assert (stored.state, stored.finished_at, stored.attempt) == ("dead", wall.now, 1)
    assert outcomes(job_id) == ["lost"]
    assert_counters_exact()


def test_a_success_ends_a_row_of_losses(wall: Wall) -> None:
    job_id = enqueue()
    lose(job_id, 1, wall)
    ack(claim_one())
    assert read(job_id).losses == 0


def test_only_the_leases_of_the_dead_are_ended(wall: Wall) -> None:
    dead, alive = register(), register()
    enqueue_each(4)
    lost = claim(2, worker_id=dead)
    kept = [*claim(1, worker_id=alive), *claim(1)]
    recovered = do(store.recover_dead, [dead])
    assert [r.lease_id for r in recovered] == [c.lease_id for c in lost]
    assert all(ack(c).accepted for c in kept)
    assert not any(ack(c).accepted for c in lost)


def test_nobody_dead_recovers_nothing() -> None:
    enqueue()
    claim_one(worker_id=register())
    with nothing_written():
        assert do(store.recover_dead, []) == []
        assert do(store.recover_dead, [10**6]) == []


def test_recovering_the_dead_twice_ends_each_lease_once() -> None:
    dead = register()
    enqueue()
    claim_one(worker_id=dead)
    assert len(do(store.recover_dead, [dead])) == 1
    with nothing_written():
        assert do(store.recover_dead, [dead]) == []
        assert do(store.recover_expired) == []


def test_recovery_takes_the_longest_overdue_first_and_keeps_its_limit(wall: Wall) -> None:
    late = enqueue(lease_seconds=20)
    early = enqueue(lease_seconds=10)
    claim(2)
    wall.advance(60)
    assert [r.job_id for r in do(store.recover_expired, 1)] == [early]
    assert [r.job_id for r in do(store.recover_expired, 1)] == [late]
    assert do(store.recover_expired, 1) == []


def test_recovery_of_the_dead_keeps_its_limit() -> None:
    dead = register()
    enqueue_each(5)
    claim(5, worker_id=dead)
    assert [len(do(store.recover_dead, [dead], limit=2)) for _ in range(4)] == [2, 2, 1, 0]
    assert_counters_exact()


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let something happen to every lease between the search for leases and their end.

    Another owner can do so where writers overlap; on SQLite nobody can, and the guard costs nothing.
    """

    def arrange(**values: object) -> None:
        real = store.Transaction.fetch

        def fetch(self: store.Transaction, statement: str, params: Any = ()) -> Any:
            found = real(self, statement, params)
            if statement.lstrip().startswith("SELECT id, job_id FROM relay_queue_lease"):
                rows(Lease).update(**values)
            return found

        monkeypatch.setattr(store.Transaction, "fetch", fetch)

    return arrange


def test_recovery_spares_a_lease_that_was_renewed_meanwhile(
    wall: Wall, meanwhile: Callable[..., None]
) -> None:
    enqueue()
    held = claim_one()
    wall.advance(60)
    meanwhile(expires_at=after(120))
    assert do(store.recover_expired) == []
    assert state(held.job_id) == "running"
    assert ack(held).accepted


@pytest.mark.parametrize("by_time", [True, False])
def test_recovery_spares_a_lease_that_was_ended_meanwhile(
    by_time: bool, wall: Wall, meanwhile: Callable[..., None]
) -> None:
    worker_id = register()
    enqueue()
    held = claim_one(worker_id=worker_id)
    wall.advance(60)
    meanwhile(ended_at=after(30), outcome="released")
    found = do(store.recover_expired) if by_time else do(store.recover_dead, [worker_id])
    assert found == []
    assert read_lease(held.lease_id).outcome == "released"


def test_recovery_of_the_dead_spares_the_lease_of_another_owner(
    wall: Wall, meanwhile: Callable[..., None]
) -> None:
    dead, alive = register(), register()
    enqueue()
    held = claim_one(worker_id=dead)
    meanwhile(worker_id=alive)
    assert do(store.recover_dead, [dead]) == []
    assert ack(held).accepted


def test_recovery_that_is_rolled_back_leaves_the_lease_open(wall: Wall) -> None:
    enqueue()
    held = claim_one(worker_id=register())
    with nothing_written(), rolled_back() as tx:
        store.recover_dead(tx, [read_lease(held.lease_id).worker_id or 0])
    assert ack(held).accepted


def test_a_recovered_job_is_claimed_with_a_new_token_and_the_next_attempt(wall: Wall) -> None:
    enqueue()
    old = claim_one()
    wall.advance(60)
    do(store.recover_expired)
    new = claim_one()
    assert (new.job_id, new.attempt) == (old.job_id, 2)
    assert new.token != old.token
    assert new.lease_id > old.lease_id


def test_attempts_are_not_charged_twice_by_recovery(wall: Wall) -> None:
    job_id = enqueue(max_attempts=3)
    attempts = []
    for _ in range(3):
        attempts.append(claim_one().attempt)
        wall.advance(60)
        do(store.recover_expired)
        wall.advance(300)
        do(store.promote)
    assert attempts == [1, 2, 3]
    assert state(job_id) == "dead"
    assert outcomes(job_id) == ["expired"] * 3


def test_recovery_ends_a_stray_lease_of_a_job_that_was_changed_by_hand(wall: Wall) -> None:
    stray, sound = enqueue_each(2)
    claim(2)
    rows(Job).filter(pk=stray).update(state="dead")
    wall.advance(60)
    assert [r.job_id for r in do(store.recover_expired)] == [sound]
    assert outcomes(stray) == ["expired"]
    assert [state(stray), state(sound)] == ["dead", "ready"]


# --- promote -----------------------------------------------------------------------------------


def test_promote_wakes_what_is_due_and_nothing_else(wall: Wall) -> None:
    due = enqueue(run_after=after(5))
    later = enqueue(run_after=after(5.000001))
    failed = enqueue(queue="mail")
    nack(claim_one("mail"), delay_seconds=4)
    wall.advance(5)
    assert do(store.promote) == {"default": 1, "mail": 1}
    assert [state(j) for j in (due, later, failed)] == ["ready", "scheduled", "ready"]
    assert counted() == {
        ("default", "ready"): 1,
        ("default", "scheduled"): 1,
        ("mail", "ready"): 1,
    }


def test_promote_takes_the_longest_due_first_and_keeps_its_limit(wall: Wall) -> None:
    ids = [enqueue(run_after=after(10 - n)) for n in range(5)]
    wall.advance(60)
    assert do(store.promote, 2) == {"default": 2}
    assert {j for j in ids if state(j) == "ready"} == set(ids[-2:])
    assert do(store.promote, 100) == {"default": 3}
    assert do(store.promote) == {}
    assert_counters_exact()


def test_an_overdue_job_rejoins_at_the_time_it_was_due(wall: Wall) -> None:
    overdue = enqueue(run_after=after(5))
    wall.advance(6)
    newcomer = enqueue()
    wall.advance(100)
    do(store.promote)
    assert claimed_ids(2) == [overdue, newcomer]


def test_a_cancelled_job_is_not_woken(wall: Wall) -> None:
    job_id = enqueue(run_after=after(5))
    cancel(job_id)
    wall.advance(10)
    with nothing_written():
        assert do(store.promote) == {}


def test_a_promotion_that_is_rolled_back_keeps_the_job_waiting(wall: Wall) -> None:
    enqueue(run_after=after(5))
    wall.advance(5)
    with nothing_written(), rolled_back() as tx:
        store.promote(tx)


# --- the clock ---------------------------------------------------------------------------------


def test_a_clock_that_steps_back_makes_no_second_valid_token(wall: Wall) -> None:
    enqueue()
    old = claim_one()
    wall.advance(60)
    do(store.recover_expired)
    new = claim_one()
    wall.advance(-3600)
    assert not ack(old).accepted
    assert ack(new).accepted


def test_a_clock_that_steps_back_loses_no_job(wall: Wall) -> None:
    ids = enqueue_each(3)
    wall.advance(-3600)
    assert claimed_ids(3) == ids


def test_a_clock_that_steps_forward_ends_leases_but_loses_no_job(wall: Wall) -> None:
    job_id = enqueue()
    held = claim_one()
    wall.advance(1e6)
    assert not ack(held).accepted
    do(store.recover_expired)
    assert claim_one().job_id == job_id
