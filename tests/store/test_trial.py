"""Only a row that is proven to be at fault is condemned: it fails alone, and a sound one passes."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest

from relay_queue import clock, store
from relay_queue.models import Job, Lease
from relay_queue.store.records import Claim, Recovered, Settlement
from relay_queue.store.trial import NoChecksumFits
from relay_queue.worker.plan import SETTLE
from relay_queue.worker.tick import settle_each
from tests.refusing import refusing
from tests.store import actions
from tests.store.actions import Wall

pytestmark = pytest.mark.usefixtures("engine")

LEASES, JOBS = "relay_queue_lease", "relay_queue_job"


def claim(limit: int = 5) -> tuple[list[Claim], store.Trial]:
    trial = store.Trial()
    with store.transaction() as tx:
        claims = store.claim(tx, worker_id=None, queues=["default"], limit=limit, trial=trial)
    return claims, trial


def recover() -> tuple[list[Recovered], store.Trial]:
    trial = store.Trial()
    with store.transaction() as tx:
        return store.recover_expired(tx, trial=trial), trial


def states() -> list[str]:
    return list(actions.rows(Job).order_by("id").values_list("state", flat=True))


def test_a_job_that_fails_alone_goes_dead_and_its_neighbours_are_claimed() -> None:
    first, bad, last = actions.enqueue_each(3)
    with refusing("INSERT", LEASES, f"new.job_id = {bad}"):
        claims, trial = claim()
    assert ([c.job_id for c in claims], trial.faults) == ([first, last], {})
    assert states() == ["running", "dead", "running"]
    actions.assert_counters_exact()


def test_an_only_job_that_fails_is_compared_with_a_sound_one_of_which_nothing_stays() -> None:
    bad = actions.enqueue()
    with refusing("INSERT", LEASES, f"new.job_id = {bad}"):
        claims, trial = claim()
    assert (claims, trial.faults, states()) == ([], {}, ["dead"])
    assert not actions.rows(Lease).exists()
    actions.assert_counters_exact()


def test_a_table_that_refuses_every_row_condemns_none() -> None:
    actions.enqueue_each(3)
    before = actions.everything()
    with refusing("INSERT", LEASES):
        claims, trial = claim()
    assert (claims, list(trial.faults)) == ([], ["claim jobs"])
    assert "not this one" in str(trial.faults["claim jobs"])
    assert actions.everything() == before
    assert len(claim()[0]) == 3


def test_where_no_sound_job_can_be_tried_an_only_job_is_not_condemned() -> None:
    bad = actions.enqueue()
    actions.rows(Job).filter(pk=bad).update(checksum=0)
    with refusing("INSERT", JOBS):
        with pytest.raises(NoChecksumFits), store.transaction() as tx:
            store.claim(tx, worker_id=None, queues=["default"], limit=5)
        claims, trial = claim()
    assert (claims, list(trial.faults), states()) == ([], ["claim jobs"], ["ready"])
    assert (claim()[0], states()) == ([], ["dead"])


def test_jobs_that_cannot_be_claimed_do_not_hide_those_behind_nor_is_more_taken_than_asked() -> (
    None
):
    bad, good, *_ = actions.enqueue_each(3)
    with refusing("INSERT", LEASES, f"new.job_id = {bad}"):
        claims, _ = claim(limit=1)
    assert [c.job_id for c in claims] == [good]
    assert states() == ["dead", "running", "ready"]


def test_checksums_that_fit_for_no_job_any_more_condemn_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a change of a column's type that alters what is read of every row."""
    actions.enqueue_each(3)
    for module in ("trial", "grant"):
        place = import_module(f"relay_queue.store.{module}")
        monkeypatch.setattr(place, "fits", lambda signed: False)
    for _ in range(2):
        with pytest.raises(NoChecksumFits), store.transaction() as tx:
            store.claim(tx, worker_id=None, queues=["default"], limit=5)
    claims, trial = claim()
    assert (claims, list(trial.faults), states()) == ([], ["claim jobs"], ["ready"] * 3)
    actions.assert_counters_exact()


def test_a_recovery_that_fails_for_one_row_only_condemns_it_and_for_all_rows_none() -> None:
    then = clock.now() - timedelta(hours=1)
    with clock.use(lambda: then):
        first, bad = actions.enqueue_each(2)
        assert len(actions.claim(2)) == 2
    with refusing("UPDATE", JOBS, "new.state <> 'dead'"):
        ended, trial = recover()
        assert (ended, list(trial.faults)) == ([], ["recover jobs"])
    assert states() == ["running", "running"]
    with refusing("UPDATE", JOBS, f"new.id = {bad} AND new.state <> 'dead'"):
        ended, trial = recover()
    assert ([each.job_id for each in ended], trial.faults) == ([first], {})
    assert states() == ["ready", "dead"]
    actions.assert_counters_exact()


def test_an_outcome_that_a_table_refuses_is_kept_and_no_failed_attempt() -> None:
    actions.enqueue_each(2)
    told = [Settlement("ack", each.lease_id, each.token) for each in actions.claim(2)]
    before = actions.everything()
    trial = store.Trial()
    with refusing("UPDATE", LEASES), store.transaction() as tx:
        assert settle_each(tx, trial, told) == []
    assert list(trial.faults) == [SETTLE]
    assert actions.everything() == before
    with store.transaction() as tx:
        assert [each.state for each in store.settle(tx, told)] == ["succeeded"] * 2


WAYS: dict[str, dict[str, Any]] = {
    "succeeded": {"verb": "ack"},
    "ready": {"verb": "release"},
    "scheduled": {"verb": "snooze", "delay_seconds": 60.0},
    "retrying": {"verb": "nack", "death_logged": True},
    "dead": {"verb": "nack", "fatal": True, "death_logged": True},
}
"""The states to which an owner can send its job, and how."""


def claim_each(count: int, **options: Any) -> list[Claim]:
    actions.enqueue_each(count, **options)
    return actions.claim(count)


def settle_in_trial(*settlements: Settlement) -> tuple[list[str], store.Trial]:
    trial = store.Trial()
    with store.transaction() as tx:
        answers = settle_each(tx, trial, settlements)
    return [answer.state for answer in answers], trial


@pytest.mark.parametrize("way", WAYS)
def test_a_table_that_refuses_one_way_neither_charges_nor_condemns_a_job_that_goes_it(
    way: str,
) -> None:
    claims = claim_each(len(WAYS), max_attempts=5)
    told = {to: claims.pop().settlement(**facts) for to, facts in WAYS.items()}
    alone = told.pop(way)
    # A lease that was settled before has an answer as well, and nothing is written for it.
    (settled,) = claim_each(1)
    actions.ack(settled)
    before = actions.everything()
    with refusing("UPDATE", JOBS, f"new.state = '{way}'"):
        answered, trial = settle_in_trial(settled.settlement("ack", repeated=True), alone)
        assert (answered, list(trial.faults)) == (["succeeded"], [SETTLE])
        assert actions.everything() == before
        answered, trial = settle_in_trial(*told.values(), alone)
    assert (answered, list(trial.faults)) == (list(told), [SETTLE])
    assert settle_in_trial(alone)[0] == [way]
    actions.assert_counters_exact()


@pytest.mark.parametrize("refused", ["retrying", "dead"])
def test_a_failure_with_attempts_left_and_one_without_go_different_ways(refused: str) -> None:
    going = {
        "retrying": claim_each(1, max_attempts=5)[0].settlement("nack"),
        "dead": claim_each(1, max_attempts=1)[0].settlement("nack"),
    }
    alone = going.pop(refused)
    with refusing("UPDATE", JOBS, f"new.state = '{refused}'"):
        answered, trial = settle_in_trial(*going.values(), alone)
    assert (answered, list(trial.faults)) == (list(going), [SETTLE])
    assert settle_in_trial(alone)[0] == [refused]


@pytest.mark.parametrize("refused", ["ready", "retrying", "dead"])
def test_a_table_that_refuses_one_way_of_a_lost_job_condemns_none(refused: str, wall: Wall) -> None:
    twice = actions.enqueue(max_attempts=5)
    actions.lose(twice, 1, wall)
    once, last = actions.enqueue(max_attempts=5), actions.enqueue(max_attempts=1)
    going = {"ready": once, "retrying": twice, "dead": last}
    assert len(actions.claim(3)) == 3
    wall.advance(3600)
    with refusing("UPDATE", JOBS, f"new.state = '{refused}'"):
        ended, trial = recover()
    assert list(trial.faults) == ["recover jobs"]
    assert {each.job_id: each.state for each in ended} == {
        job_id: state for state, job_id in going.items() if state != refused
    }
    assert [(each.job_id, each.state) for each in recover()[0]] == [(going[refused], refused)]
    actions.assert_counters_exact()


@pytest.mark.parametrize("way", ["succeeded", "ready", "retrying"])
def test_where_no_sound_job_can_be_made_only_one_that_went_the_same_way_proves_a_row_bad(
    way: str,
) -> None:
    bad, *others = claim_each(2 * len(WAYS), max_attempts=5)
    told = bad.settlement(**WAYS[way])

    def settlements(*ways: str) -> list[Settlement]:
        return [others.pop().settlement(**WAYS[to]) for to in ways]

    refused = f"new.id = {bad.job_id} AND new.state <> 'dead'"
    with refusing("INSERT", JOBS), refusing("UPDATE", JOBS, refused):
        answered, trial = settle_in_trial(*settlements(*WAYS.keys() - {way}), told)
        assert (len(answered), list(trial.faults)) == (len(WAYS) - 1, [SETTLE])
        assert actions.state(bad.job_id) == "running"
        _, trial = settle_in_trial(*settlements(*WAYS), told)
    assert (trial.faults, actions.state(bad.job_id)) == ({}, "dead")
    actions.assert_counters_exact()


def test_where_no_sound_job_can_be_made_another_claim_proves_a_row_bad() -> None:
    bad = actions.enqueue()
    with refusing("INSERT", JOBS), refusing("INSERT", LEASES, f"new.job_id = {bad}"):
        claims, trial = claim()
    assert (claims, list(trial.faults), states()) == ([], ["claim jobs"], ["ready"])
    good = actions.enqueue()
    with refusing("INSERT", JOBS), refusing("INSERT", LEASES, f"new.job_id = {bad}"):
        claims, trial = claim()
    assert ([each.job_id for each in claims], trial.faults) == ([good], {})
    assert states() == ["dead", "running"]
    actions.assert_counters_exact()


@pytest.mark.parametrize("attempts", [1, 5])
def test_where_no_sound_job_can_be_made_only_a_lost_job_of_the_same_way_proves_a_row_bad(
    attempts: int, wall: Wall
) -> None:
    bad, other = actions.enqueue(max_attempts=5), actions.enqueue(max_attempts=attempts)
    assert len(actions.claim(2)) == 2
    wall.advance(3600)
    refused = f"new.id = {bad} AND new.state <> 'dead'"
    with refusing("INSERT", JOBS), refusing("UPDATE", JOBS, refused):
        ended, trial = recover()
    assert [each.job_id for each in ended] == [other]
    proven = attempts == 5  # else the other went dead, and this one would be ready again
    assert actions.state(bad) == ("dead" if proven else "running")
    assert list(trial.faults) == ([] if proven else ["recover jobs"])
    actions.assert_counters_exact()
