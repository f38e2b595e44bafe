"""Claim and renew: what an owner gets, and for how long."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import DataError, IntegrityError

from relay_queue import store
from relay_queue.models import Job, Lease
from tests.store.actions import (
    START,
    TASK,
    Wall,
    ack,
    after,
    assert_counters_exact,
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
    read_lease,
    register,
    release,
    rolled_back,
    rows,
    state,
)

pytestmark = pytest.mark.usefixtures("wall")


def renew(held: store.Claim, seconds: float = 60.0, token: str | None = None) -> bool:
    word = (held.lease_id, held.token if token is None else token, seconds)
    return do(store.renew, [word]) == {held.lease_id}


def test_a_claim_carries_what_its_owner_needs_and_opens_one_lease(wall: Wall) -> None:
    worker_id = register()
    job_id = enqueue(args=[1], idempotency_key="k", priority=2, timeout_seconds=5, max_attempts=4)
    wall.advance(2.5)
    held = claim_one(worker_id=worker_id)
    assert (held.job_id, held.queue, held.backend, held.task) == (
        job_id,
        "default",
        "default",
        TASK,
    )
    assert json.loads(held.payload) == {"args": [1], "kwargs": {}}
    assert (held.idempotency_key, held.priority, held.timeout_seconds) == ("k", 2, 5.0)
    assert (held.attempt, held.attempts_left, held.suspect) == (1, 3, False)
    assert (held.created_at, held.acquired_at, held.wait_seconds) == (START, wall.now, 2.5)
    assert (held.lease_seconds, held.expires_at) == (60.0, after(62.5))
    lease = read_lease(held.lease_id)
    assert (lease.job_id, lease.attempt, lease.token) == (job_id, 1, held.token)
    assert (lease.worker_id, lease.acquired_at) == (worker_id, wall.now)
    assert (lease.expires_at, lease.renewed_at) == (held.expires_at, None)
    assert (lease.ended_at, lease.outcome) == (None, None)
    stored = read(job_id)
    assert (stored.state, stored.attempt, stored.started_at) == ("running", 1, wall.now)
    assert_counters_exact()


def test_the_first_start_of_a_job_is_kept_over_its_attempts(wall: Wall) -> None:
    job_id = enqueue()
    nack(claim_one())
    wall.advance(10)
    do(store.promote)
    claim_one()
    assert read(job_id).started_at == START


def test_each_lease_has_a_token_of_its_own_that_cannot_be_guessed() -> None:
    enqueue_each(20)
    tokens = {c.token for c in claim(20)}
    assert len(tokens) == 20
    assert all(len(token) == 32 for token in tokens)


def test_a_later_lease_has_a_larger_epoch() -> None:
    enqueue_each(3)
    epochs = [c.lease_id for c in claim(2)]
    released = claim_one()
    release(released)
    epochs += [released.lease_id, claim_one().lease_id]
    assert epochs == sorted(set(epochs))


def test_a_running_job_is_never_claimed_again_even_after_its_lease_expired(wall: Wall) -> None:
    enqueue()
    claim_one()
    assert claim(5) == []
    wall.advance(3600)
    assert claim(5) == []


@pytest.mark.parametrize("limit", [0, -1, -1000])
def test_a_claim_for_no_place_takes_nothing(limit: int) -> None:
    enqueue()
    with nothing_written():
        assert claim(limit) == []


def test_a_claim_takes_no_more_than_its_limit() -> None:
    enqueue_each(5)
    assert len(claim(3)) == 3
    assert len(claim(3)) == 2
    assert claim(3) == []


def test_an_empty_queue_gives_nothing_and_counts_nothing() -> None:
    assert claim(3, "a", "b") == []
    assert_counters_exact()
    assert do(store.claim, worker_id=None, queues=[], limit=3) == []


CHANGES = {
    "sqlite": "SELECT total_changes()",
    "postgresql": "SELECT pg_current_xact_id_if_assigned()",
}
"""What differs once a transaction has something that its commit must flush to the disk."""


def test_a_claim_in_vain_gives_its_commit_nothing_to_flush(engine: str) -> None:
    enqueue(queue="other")
    with store.transaction(wait_seconds=1.0, first=True) as tx:
        before = tx.fetch(CHANGES[engine])
        claimed = store.claim(tx, worker_id=None, queues=["default", "gone"], limit=2)
        tx.flush()
        assert (claimed, tx.fetch(CHANGES[engine])) == ([], before)
        store.claim(tx, worker_id=None, queues=["other"], limit=1)
        assert tx.fetch(CHANGES[engine]) != before


def test_a_queue_named_twice_is_served_once() -> None:
    ids = enqueue_each(3)
    assert claimed_ids(9, "default", "default") == ids


def test_the_lease_is_as_long_as_the_job_asks_or_the_worker_insists() -> None:
    enqueue(lease_seconds=7.5)
    enqueue(lease_seconds=7.5)
    assert claim_one().expires_at == after(7.5)
    held = claim_one(lease_seconds=2.0)
    assert (held.lease_seconds, held.expires_at) == (2.0, after(2))
    assert read_lease(held.lease_id).expires_at == after(2)


def test_a_worker_of_one_backend_takes_only_its_jobs() -> None:
    mine = enqueue(backend="mine")
    other = enqueue(backend="other")
    assert claimed_ids(5, backends=["mine"]) == [mine]
    assert claim(5, backends=[]) == []
    assert claimed_ids(5, backends=["mine", "other"]) == [other]


ALTERATIONS = {
    "payload": '{"args":[2],"kwargs":{}}',
    "task": "os.system",
    "backend": "other",
    "idempotency_key": "another",
    "checksum": 1,
}


@pytest.mark.parametrize("column", ALTERATIONS)
def test_an_altered_job_goes_dead_with_the_reason_and_never_to_a_function(column: str) -> None:
    job_id = enqueue(args=[1], idempotency_key="k")
    sound = enqueue()
    rows(Job).filter(pk=job_id).update(**{column: ALTERATIONS[column]})
    assert claimed_ids(5) == [sound]
    stored = read(job_id)
    assert (stored.state, stored.attempt, stored.finished_at) == ("dead", 0, START)
    assert "ChecksumMismatch" in stored.last_error
    assert outcomes(job_id) == []
    assert_counters_exact()


def test_a_job_moved_to_another_queue_by_hand_goes_dead() -> None:
    job_id = enqueue()
    do(store.ensure_queue, "mail")
    rows(Job).filter(pk=job_id).update(queue="mail")
    assert claim(5, "mail") == []
    assert state(job_id) == "dead"


def test_when_only_altered_jobs_are_ready_the_claim_is_empty() -> None:
    job_id = enqueue()
    rows(Job).filter(pk=job_id).update(payload="{}")
    assert claim(1) == []
    assert state(job_id) == "dead"
    assert_counters_exact()


def test_an_altered_job_that_never_ran_has_no_start() -> None:
    job_id = enqueue()
    rows(Job).filter(pk=job_id).update(payload="{}")
    claim(1)
    assert read(job_id).started_at is None


def test_an_altered_job_is_taken_out_of_a_queue_that_is_known_to_have_no_limit() -> None:
    enqueue()
    ack(claim_one())  # from here on one statement may do all of a claim
    first, altered, last = enqueue_each(3)
    rows(Job).filter(pk=altered).update(payload="{}")
    assert claimed_ids(3) == [first, last]
    job = read(altered)
    assert (job.state, job.attempt, job.started_at) == ("dead", 0, None)
    assert (job.finished_at, job.last_error.partition(":")[0]) == (START, "ChecksumMismatch")
    assert outcomes(altered) == []
    assert_counters_exact()


def test_an_altered_job_that_was_handed_back_keeps_the_start_it_had(wall: Wall) -> None:
    job_id = enqueue()
    release(claim_one())
    wall.advance(5)
    rows(Job).filter(pk=job_id).update(payload="{}")
    assert claim(1) == []
    job = read(job_id)
    assert (job.state, job.attempt, job.started_at) == ("dead", 0, START)


def test_a_job_that_moved_on_between_the_search_and_the_start_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where writers overlap somebody can cancel it in between, unless both are one statement."""
    enqueue_each(2)
    real = store.Transaction.fetch

    def fetch(self: store.Transaction, statement: str, params: Any = ()) -> Any:
        found = real(self, statement, params)
        if statement.lstrip().startswith("SELECT id, losses"):
            rows(Job).update(state="cancelled")
        return found

    monkeypatch.setattr(store.Transaction, "fetch", fetch)
    assert claim(2, "default", "mail") == []
    assert set(rows(Job).values_list("state", flat=True)) == {"cancelled"}
    assert not rows(Lease).exists()


def test_a_claim_that_is_rolled_back_leaves_the_job_ready() -> None:
    job_id = enqueue()
    with nothing_written(), rolled_back() as tx:
        store.claim(tx, worker_id=None, queues=["default"], limit=1)
    assert claim_one().job_id == job_id


@pytest.mark.parametrize("state", ["Ready", "read", "", "%", "ready,dead", None])
def test_the_database_itself_refuses_a_state_that_does_not_exist(state: str | None) -> None:
    job_id = enqueue()
    with pytest.raises((IntegrityError, DataError)):  # PostgreSQL: some are too long
        rows(Job).filter(pk=job_id).update(state=state)
    assert rows(Job).get(pk=job_id).state == "ready"


def test_the_database_itself_refuses_to_leave_a_lease_without_its_job() -> None:
    job_id = enqueue()
    claim_one()
    with pytest.raises(IntegrityError):
        rows(Job).filter(pk=job_id).delete()
    assert read(job_id).state == "running"


def test_the_database_itself_refuses_a_second_open_lease(wall: Wall) -> None:
    job_id = enqueue()
    held = claim_one()
    with pytest.raises(IntegrityError):
        rows(Lease).create(
            job_id=job_id, attempt=1, token="x", acquired_at=wall.now, expires_at=after(60)
        )
    assert ack(held).accepted


# --- renew -------------------------------------------------------------------------------------


def test_renewing_moves_the_end_of_the_lease_from_now(wall: Wall) -> None:
    enqueue()
    held = claim_one()
    wall.advance(30)
    assert renew(held, 60)
    lease = read_lease(held.lease_id)
    assert (lease.renewed_at, lease.expires_at) == (wall.now, after(90))
    wall.advance(59.999999)
    assert ack(held).accepted


def test_renewing_can_shorten_a_lease(wall: Wall) -> None:
    enqueue()
    held = claim_one()
    assert renew(held, 1)
    wall.advance(1)
    assert not renew(held)


def test_a_lease_that_has_expired_cannot_be_renewed_even_if_nobody_recovered_it(
    wall: Wall,
) -> None:
    enqueue()
    held = claim_one()
    wall.advance(60)
    with nothing_written():
        assert not renew(held)


def test_a_renewal_that_waited_for_the_writer_is_judged_by_when_it_was_wanted(wall: Wall) -> None:
    enqueue()
    held = claim_one()
    word = (held.lease_id, held.token, 60.0)
    wall.advance(70)
    with nothing_written():
        assert not do(store.renew, [word], waited_seconds=10.0)
    assert do(store.renew, [word], waited_seconds=10.5) == {held.lease_id}
    assert read_lease(held.lease_id).expires_at == after(130)
    assert ack(held).accepted


def test_no_wait_renews_a_lease_that_somebody_has_ended(wall: Wall) -> None:
    enqueue()
    held = claim_one()
    wall.advance(70)
    do(store.recover_expired)
    with nothing_written():
        word = (held.lease_id, held.token, 60.0)
        assert not do(store.renew, [word], waited_seconds=69.0)


def test_the_last_microsecond_of_a_lease_still_counts(wall: Wall) -> None:
    enqueue()
    held = claim_one()
    wall.advance(59.999999)
    assert renew(held)


def test_a_forged_token_renews_nothing() -> None:
    enqueue()
    held = claim_one()
    for token in ("", "0" * 32, held.token.upper() + "x", held.token[:-1], "%"):
        with nothing_written():
            assert not renew(held, token=token)


def test_a_token_of_one_lease_does_not_renew_another() -> None:
    enqueue_each(2)
    one, two = claim(2)
    with nothing_written():
        assert not renew(one, token=two.token)


def test_an_ended_lease_cannot_be_renewed() -> None:
    enqueue()
    held = claim_one()
    ack(held)
    with nothing_written():
        assert not renew(held)


def test_renewing_answers_which_leases_are_lost() -> None:
    enqueue_each(3)
    held = claim(3)
    ack(held[1])
    words = [(c.lease_id, c.token, 60.0) for c in held]
    assert do(store.renew, [*words, (10**9, "x", 60.0)]) == {held[0].lease_id, held[2].lease_id}
    assert do(store.renew, []) == set()


def test_many_leases_are_renewed_at_once() -> None:
    enqueue_each(5)
    held = claim(5)
    words = [(c.lease_id, c.token, 100.0 + n) for n, c in enumerate(held)]
    assert do(store.renew, words) == {c.lease_id for c in held}
    ends = [read_lease(c.lease_id).expires_at for c in held]
    assert ends == [START + timedelta(seconds=100 + n) for n in range(5)]


def test_what_an_operator_has_set_since_the_last_claim_holds() -> None:
    enqueue_each(6)
    assert len(claim(1)) == 1
    do(store.set_limits, "default", capacity=None, max_running=2)
    assert len(claim(6)) == 1
    assert claim(6) == []
    do(store.set_limits, "default", capacity=None, max_running=None)
    assert len(claim(1)) == 1
    do(store.pause, "default")
    assert claim(6) == []
    do(store.resume, "default")
    assert len(claim(6)) == 3
