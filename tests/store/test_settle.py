"""Settle: the holder of an open, unexpired lease's token decides; everybody else is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from relay_queue import store
from relay_queue.backoff import Backoff
from relay_queue.models import Job
from relay_queue.operations import REQUEUE
from relay_queue.store import Settlement
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
    kill,
    lose,
    nack,
    nothing_written,
    outcomes,
    read,
    read_lease,
    register,
    release,
    rolled_back,
    rows,
    settle,
    snooze,
    state,
)

pytestmark = pytest.mark.usefixtures("wall")


def test_an_ack_ends_the_job_with_its_result(wall: Wall) -> None:
    job_id = enqueue()
    held = claim_one()
    wall.advance(3)
    answer = ack(held, '{"a":1}')
    assert answer == store.Settled(held.lease_id, job_id, "default", "succeeded")
    stored = read(job_id)
    assert (stored.state, stored.result, stored.finished_at) == ("succeeded", '{"a":1}', after(3))
    assert (stored.attempt, stored.losses, stored.last_error) == (1, 0, "")
    lease = read_lease(held.lease_id)
    assert (lease.outcome, lease.ended_at) == ("acked", after(3))
    assert_counters_exact()


def test_an_ack_clears_the_error_of_earlier_attempts(wall: Wall) -> None:
    job_id = enqueue()
    nack(claim_one(), message="boom")
    assert read(job_id).last_error == "boom"
    wall.advance(10)
    do(store.promote)
    ack(claim_one())
    assert read(job_id).last_error == ""
    assert outcomes(job_id) == ["failed", "acked"]


def test_a_nack_backs_off_and_keeps_the_error_on_the_attempt(wall: Wall) -> None:
    job_id = enqueue(backoff=Backoff(2.0, 300.0))
    held = claim_one()
    wall.advance(5)
    answer = nack(held, error="app.Boom", message="Boom: no", traceback="line\nline")
    assert (answer.state, answer.accepted) == ("retrying", True)
    stored = read(job_id)
    assert (stored.state, stored.available_at, stored.finished_at) == ("retrying", after(7), None)
    assert (stored.attempt, stored.last_error) == (1, "Boom: no")
    lease = read_lease(held.lease_id)
    assert (lease.outcome, lease.error, lease.traceback) == ("failed", "app.Boom", "line\nline")
    assert claim(5) == []
    assert_counters_exact()


def test_back_off_doubles_with_each_failure_up_to_its_limit(wall: Wall) -> None:
    job_id = enqueue(backoff=Backoff(1.0, 5.0), max_attempts=6)
    delays = []
    for _ in range(5):
        nack(claim_one())
        delays.append((read(job_id).available_at - wall.now).total_seconds())
        wall.advance(delays[-1])
        do(store.promote)
    assert delays == [1, 2, 4, 5, 5]


def test_full_jitter_is_sampled_once_and_persisted(wall: Wall) -> None:
    ids = enqueue_each(20, backoff=Backoff(100.0, 100.0, "full"))
    settle([Settlement("nack", c.lease_id, c.token) for c in claim(20)])
    delays = {(read(job_id).available_at - START).total_seconds() for job_id in ids}
    assert len(delays) > 10
    assert all(0 <= delay <= 100 for delay in delays)


def test_the_function_may_choose_the_delay_of_its_retry() -> None:
    job_id = enqueue()
    nack(claim_one(), delay_seconds=42.5)
    assert read(job_id).available_at == after(42.5)


def test_a_retry_after_zero_seconds_is_due_at_once() -> None:
    job_id = enqueue()
    nack(claim_one(), delay_seconds=0)
    assert state(job_id) == "retrying"
    do(store.promote)
    assert claim_one().attempt == 2


def test_exhausted_attempts_make_a_dead_letter(wall: Wall) -> None:
    job_id = enqueue(max_attempts=2)
    assert nack(claim_one()).state == "retrying"
    wall.advance(1)
    do(store.promote)
    held = claim_one()
    assert held.attempts_left == 0
    assert nack(held, message="again").state == "dead"
    stored = read(job_id)
    assert (stored.attempt, stored.finished_at) == (2, wall.now)
    assert outcomes(job_id) == ["failed", "failed"]
    assert_counters_exact()


def test_a_delay_does_not_save_an_exhausted_job() -> None:
    job_id = enqueue(max_attempts=1)
    nack(claim_one(), delay_seconds=5)
    assert state(job_id) == "dead"


def test_a_fatal_failure_is_dead_at_once_with_attempts_left() -> None:
    job_id = enqueue(max_attempts=10)
    assert nack(claim_one(), fatal=True, message="bad input").state == "dead"
    assert outcomes(job_id) == ["fatal"]
    assert read(job_id).last_error == "bad input"


def test_a_timed_out_attempt_is_a_failure_with_its_own_name() -> None:
    job_id = enqueue()
    held = claim_one()
    (answer,) = settle([Settlement("nack", held.lease_id, held.token, timed_out=True)])
    assert (answer.state, outcomes(job_id)) == ("retrying", ["timed_out"])
    assert ack(held).reason == "the lease had ended: timed_out"


def test_a_snooze_waits_and_does_not_charge_the_attempt(wall: Wall) -> None:
    job_id = enqueue(max_attempts=1)
    for n in range(3):
        assert snooze(claim_one(), 10).state == "scheduled"
        stored = read(job_id)
        assert (stored.attempt, stored.available_at) == (0, after(10 * (n + 1)))
        wall.advance(10)
        do(store.promote)
    assert claim_one().attempt == 1
    assert outcomes(job_id) == ["snoozed"] * 3 + [None]
    assert_counters_exact()


def test_a_release_hands_the_job_back_uncharged_in_its_place(wall: Wall) -> None:
    first, second = enqueue_each(2)
    held = claim_one()
    before = read(first)
    wall.advance(5)
    assert release(held).state == "ready"
    stored = read(first)
    assert (stored.attempt, stored.rank, stored.available_at) == (0, before.rank, START)
    assert outcomes(first) == ["released"]
    assert claimed_ids(2) == [first, second]
    assert_counters_exact()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 1e15, -5.0])
@pytest.mark.parametrize("verb", ["snooze", "nack"])
def test_a_delay_that_is_no_duration_is_refused_and_changes_nothing(
    verb: str, seconds: float
) -> None:
    from relay_queue.exceptions import InvalidJob

    enqueue()
    held = claim_one()
    word = Settlement(verb, held.lease_id, held.token, delay_seconds=seconds)  # type: ignore[arg-type]
    with nothing_written(), store.transaction() as tx, pytest.raises(InvalidJob):
        store.settle(tx, [word])


# --- late and forged words ---------------------------------------------------------------------

Ending = Callable[[store.Claim, Wall], None]


def _expire(held: store.Claim, wall: Wall) -> None:
    wall.advance(60)


def _recover(held: store.Claim, wall: Wall) -> None:
    wall.advance(60)
    assert len(do(store.recover_expired)) == 1


def _reclaim(held: store.Claim, wall: Wall) -> None:
    _recover(held, wall)
    assert claim_one().job_id == held.job_id


def _kill(held: store.Claim, wall: Wall) -> None:
    kill(held)


def _cancel(held: store.Claim, wall: Wall) -> None:
    cancel(held.job_id)


def _release(held: store.Claim, wall: Wall) -> None:
    release(held)


def _take(held: store.Claim, wall: Wall) -> None:
    assert do(store.release_leases, [held.job_id]).job_ids == [held.job_id]


def _fail(held: store.Claim, wall: Wall) -> None:
    nack(held)


def _requeue(held: store.Claim, wall: Wall) -> None:
    nack(held, fatal=True)
    do(REQUEUE.change_one, held.job_id)
    assert claim_one().job_id == held.job_id


ENDINGS: dict[str, tuple[Ending, str]] = {
    "expired": (_expire, "the lease had expired"),
    "recovered": (_recover, "the lease had ended: expired"),
    "claimed by another": (_reclaim, "the lease had ended: expired"),
    "owner dead": (_kill, "the lease had ended: lost"),
    "cancelled": (_cancel, "the lease had ended: cancelled"),
    "released": (_release, "the lease had ended: released"),
    "taken by an operator": (_take, "the lease had ended: released"),
    "failed": (_fail, "the lease had ended: failed"),
    "requeued and claimed": (_requeue, "the lease had ended: fatal"),
}


@pytest.mark.parametrize("verb", ["ack", "nack", "snooze", "release"])
@pytest.mark.parametrize("how", ENDINGS)
def test_a_late_word_is_refused_and_recorded_and_changes_nothing_else(
    how: str, verb: str, wall: Wall
) -> None:
    end, reason = ENDINGS[how]
    job_id = enqueue(max_attempts=5)
    held = claim_one(worker_id=register())
    end(held, wall)
    before = read(job_id)
    leases = [(x.id, x.outcome, x.ended_at, x.error) for x in before.leases.order_by("id")]
    wall.advance(1)
    (answer,) = settle([Settlement(verb, held.lease_id, held.token, result="1", error="E")])  # type: ignore[arg-type]
    assert not answer.accepted
    assert (answer.job_id, answer.state, answer.reason) == (job_id, before.state, reason)
    after_it = read(job_id)
    for name in (f.attname for f in before._meta.concrete_fields):
        assert getattr(after_it, name) == getattr(before, name), name
    assert [
        (x.id, x.outcome, x.ended_at, x.error) for x in after_it.leases.order_by("id")
    ] == leases
    lease = read_lease(held.lease_id)
    assert (lease.refused_at, lease.refused_verb, lease.refused_reason) == (wall.now, verb, reason)
    assert_counters_exact()


def test_the_new_owner_can_settle_after_the_old_one_was_refused(wall: Wall) -> None:
    job_id = enqueue()
    old = claim_one()
    wall.advance(60)
    do(store.recover_expired)
    new = claim_one()
    assert new.lease_id > old.lease_id
    assert not ack(old, '"old"').accepted
    assert ack(new, '"new"').accepted
    assert read(job_id).result == '"new"'
    assert not ack(old, '"old"').accepted
    assert outcomes(job_id) == ["expired", "acked"]


def test_a_lease_that_expired_this_very_microsecond_is_over(wall: Wall) -> None:
    enqueue_each(2)
    in_time, late = claim(2)
    wall.advance(59.999999)
    assert ack(in_time).accepted
    wall.advance(0.000001)
    assert not ack(late).accepted


def test_an_expired_lease_that_was_refused_is_still_recovered(wall: Wall) -> None:
    job_id = enqueue()
    held = claim_one()
    wall.advance(61)
    ack(held)
    assert [r.job_id for r in do(store.recover_expired)] == [job_id]
    assert state(job_id) == "ready"


@pytest.mark.parametrize("verb", ["ack", "nack", "snooze", "release"])
@pytest.mark.parametrize("forge", [lambda t: "", lambda t: "0" * 32, lambda t: t[:-1], str.upper])
def test_a_forged_token_changes_nothing_and_learns_nothing(
    verb: str, forge: Callable[[str], str]
) -> None:
    enqueue()
    held = claim_one()
    token = forge(held.token)
    if token == held.token:
        pytest.skip("a token without letters has no upper case")
    with nothing_written():
        (answer,) = settle([Settlement(verb, held.lease_id, token)])  # type: ignore[arg-type]
    assert not answer.accepted
    assert (answer.job_id, answer.queue, answer.state) == (None, "", "")
    assert ack(held).accepted


def test_a_token_of_another_lease_changes_neither() -> None:
    enqueue_each(2)
    one, two = claim(2)
    with nothing_written():
        assert not do(store.ack, one.lease_id, two.token).accepted
    assert ack(one).accepted
    assert ack(two).accepted


@pytest.mark.parametrize("lease_id", [0, -1, 10**12])
def test_a_word_on_an_unknown_lease_is_refused(lease_id: int) -> None:
    enqueue()
    claim_one()
    with nothing_written():
        answer = do(store.ack, lease_id, "x")
    assert (answer.accepted, answer.job_id) == (False, None)


def test_a_word_on_a_pruned_lease_is_refused(wall: Wall) -> None:
    enqueue()
    held = claim_one()
    ack(held)
    wall.advance(1)
    do(store.prune, "succeeded", wall.now)
    assert not ack(held).accepted


# --- told twice --------------------------------------------------------------------------------


def test_an_ack_told_twice_is_answered_as_the_success_that_it_was(wall: Wall) -> None:
    job_id = enqueue()
    held = claim_one()
    first = ack(held, "1")
    wall.advance(120)
    with nothing_written():
        assert ack(held, "2") == first
    assert read(job_id).result == "1"


@pytest.mark.parametrize("verb", ["nack", "snooze", "release"])
def test_only_an_ack_may_be_told_twice(verb: str) -> None:
    enqueue()
    held = claim_one()
    ack(held)
    (answer,) = settle([Settlement(verb, held.lease_id, held.token)])  # type: ignore[arg-type]
    assert answer.reason == "the lease had ended: acked"
    assert state(held.job_id) == "succeeded"


@pytest.mark.parametrize("verb", ["ack", "nack", "snooze", "release"])
def test_what_is_told_again_after_a_lost_commit_is_answered_as_the_first_time(
    verb: str, wall: Wall
) -> None:
    enqueue()
    held = claim_one()
    told = Settlement(verb, held.lease_id, held.token, delay_seconds=5)  # type: ignore[arg-type]
    (first,) = settle([told])
    wall.advance(120)
    with nothing_written():
        assert settle([replace(told, repeated=True)]) == [first]


def test_another_word_than_the_first_is_refused_although_it_is_told_again() -> None:
    enqueue()
    held = claim_one()
    settle([Settlement("release", held.lease_id, held.token)])
    (answer,) = settle([Settlement("nack", held.lease_id, held.token, repeated=True)])
    assert answer.reason == "the lease had ended: released"
    forged = Settlement("release", held.lease_id, "0" * 32, repeated=True)
    assert not settle([forged])[0].accepted


def test_a_second_ack_with_a_forged_token_is_no_success() -> None:
    enqueue()
    held = claim_one()
    ack(held)
    assert not do(store.ack, held.lease_id, "0" * 32).accepted


@pytest.mark.parametrize(
    ("words", "accepted", "ends"),
    [
        (("ack", "nack"), [True, False], "succeeded"),
        (("nack", "ack"), [True, False], "retrying"),
        (("ack", "ack"), [True, True], "succeeded"),
        (("release", "ack"), [True, False], "ready"),
        (("snooze", "nack", "ack"), [True, False, False], "scheduled"),
    ],
)
def test_of_two_words_on_one_lease_in_a_batch_the_first_stands(
    words: tuple[str, ...], accepted: list[bool], ends: str
) -> None:
    job_id = enqueue()
    held = claim_one()
    told = [Settlement(w, held.lease_id, held.token, delay_seconds=5) for w in words]  # type: ignore[arg-type]
    assert [answer.accepted for answer in settle(told)] == accepted
    assert state(job_id) == ends
    assert_counters_exact()


def test_a_forged_word_in_a_batch_does_not_push_aside_the_true_one() -> None:
    job_id = enqueue()
    held = claim_one()
    forged = Settlement("nack", held.lease_id, "0" * 32, fatal=True)
    answers = settle([forged, Settlement("ack", held.lease_id, held.token)])
    assert [answer.accepted for answer in answers] == [False, True]
    assert state(job_id) == "succeeded"


def test_the_same_word_object_twice_in_a_batch_is_one_word() -> None:
    enqueue()
    held = claim_one()
    word = Settlement("nack", held.lease_id, held.token)
    first, second = settle([word, word])
    assert first == second
    assert first.accepted
    assert_counters_exact()


# --- batches -----------------------------------------------------------------------------------


def test_no_words_are_answered_by_no_answers() -> None:
    with nothing_written():
        assert settle([]) == []


def test_a_batch_of_all_verbs_is_answered_in_its_order(wall: Wall) -> None:
    enqueue_each(6)
    held = claim(6)
    wall.advance(1)
    words = [
        Settlement("release", held[3].lease_id, held[3].token),
        Settlement("ack", held[0].lease_id, held[0].token, result="7"),
        Settlement("nack", 999_999, "x"),
        Settlement("nack", held[1].lease_id, held[1].token, message="a"),
        Settlement("nack", held[4].lease_id, held[4].token, fatal=True, message="b"),
        Settlement("snooze", held[2].lease_id, held[2].token, delay_seconds=5),
        Settlement("ack", held[5].lease_id, "forged"),
    ]
    answers = settle(words)
    assert [a.lease_id for a in answers] == [w.lease_id for w in words]
    assert [a.state for a in answers] == [
        "ready",
        "succeeded",
        "",
        "retrying",
        "dead",
        "scheduled",
        "",
    ]
    assert [state(c.job_id) for c in held] == [
        "succeeded",
        "retrying",
        "scheduled",
        "ready",
        "dead",
        "running",
    ]
    assert [read(held[n].job_id).last_error for n in (1, 4)] == ["a", "b"]
    assert_counters_exact()


def test_each_job_of_a_batch_gets_its_own_result() -> None:
    ids = enqueue_each(50)
    held = claim(50)
    settle([Settlement("ack", c.lease_id, c.token, result=str(c.job_id)) for c in reversed(held)])
    assert [read(job_id).result for job_id in ids] == [str(job_id) for job_id in ids]
    assert_counters_exact()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 17, 300])
def test_a_batch_may_have_any_number_of_words(count: int) -> None:
    """Statements are padded to a few sizes; what pads them must match nothing."""
    bystanders = enqueue_each(2)
    claim(2)
    ids = enqueue_each(count)
    held = claim(count)
    assert do(store.renew, [(c.lease_id, c.token, 90.0) for c in held]) == {
        c.lease_id for c in held
    }
    words = ("ack", "nack", "snooze", "release")
    told = [
        Settlement(words[n % 4], c.lease_id, c.token, result=str(n), message=str(n))  # type: ignore[arg-type]
        for n, c in enumerate(held)
    ]
    answers = settle(told)
    states = ("succeeded", "retrying", "scheduled", "ready")
    assert [a.state for a in answers] == [states[n % 4] for n in range(count)]
    assert [state(job_id) for job_id in ids] == [a.state for a in answers]
    assert read(ids[0]).result == "0"
    assert [state(job_id) for job_id in bystanders] == ["running"] * 2
    late = [word for word in told if word.verb != "ack"]
    assert not any(answer.accepted for answer in settle(late))
    assert_counters_exact()


def test_a_batch_that_is_rolled_back_leaves_every_lease_open() -> None:
    enqueue_each(3)
    held = claim(3)
    with nothing_written(), rolled_back() as tx:
        store.settle(tx, [Settlement("ack", c.lease_id, c.token) for c in held])
    assert all(ack(c).accepted for c in held)


@pytest.mark.parametrize("verb", ["ack", "nack", "snooze", "release"])
def test_a_word_on_a_job_that_was_changed_by_hand_is_refused_and_spares_the_others(
    verb: str,
) -> None:
    damaged, sound = enqueue_each(2)
    one, two = claim(2)
    rows(Job).filter(pk=damaged).update(state="dead")
    words = [Settlement(verb, c.lease_id, c.token, delay_seconds=1) for c in (one, two)]  # type: ignore[arg-type]
    assert [answer.accepted for answer in settle(words)] == [False, True]
    assert (state(damaged), state(sound) != "running") == ("dead", True)


@pytest.mark.parametrize("verb", ["ack", "nack"])
def test_no_word_revives_a_job_that_was_changed_by_hand(verb: str) -> None:
    job_id = enqueue()
    held = claim_one()
    rows(Job).filter(pk=job_id).update(state="dead")
    with suppress(KeyError):
        settle([Settlement(verb, held.lease_id, held.token)])  # type: ignore[arg-type]
    assert state(job_id) == "dead"


# --- losses ------------------------------------------------------------------------------------


def test_a_failure_or_a_snooze_ends_a_row_of_losses(wall: Wall) -> None:
    job_id = enqueue(max_attempts=10)
    lose(job_id, 2, wall)
    assert read(job_id).losses == 2
    nack(claim_one(), delay_seconds=0)
    assert read(job_id).losses == 0
    do(store.promote)
    lose(job_id, 1, wall)
    snooze(claim_one(), 0)
    assert read(job_id).losses == 0


@pytest.mark.parametrize("by", ["owner", "operator"])
def test_a_release_says_nothing_of_a_suspect(by: str, wall: Wall) -> None:
    job_id = enqueue(max_attempts=10)
    lose(job_id, 2, wall)
    held = claim_one()
    release(held) if by == "owner" else do(store.release_leases, [job_id])
    assert read(job_id).losses == 2
