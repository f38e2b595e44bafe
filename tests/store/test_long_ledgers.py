"""Long ledgers: whatever deletes is bounded in leases, and a job that snoozes for ever stays short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections

from relay_queue import api, conf, store
from relay_queue.models import Job, Lease
from relay_queue.operations import DISCARD
from relay_queue.query import ledger
from relay_queue.query import verify as verification
from relay_queue.query.verify import verify
from relay_queue.states import KEPT_LEASES, State
from relay_queue.store.prune import MOST_LEASES
from tests.store.actions import (
    Wall,
    ack,
    add_leases,
    assert_counters_exact,
    claim,
    claim_one,
    do,
    enqueue,
    enqueue_each,
    nack,
    rows,
)

pytestmark = pytest.mark.usefixtures("wall")

LONG = 100_000
"""More leases than a function makes that snoozes each second for a day."""


def leases_of(job_id: int) -> int:
    return rows(Lease).filter(job=job_id).count()


def faults() -> list[str]:
    """What the rules say of the rows; the file and its log are not looked at."""
    return [fault.message for fault in verify().faults]


def pruned_away(state: State, wall: Wall) -> Iterator[int]:
    """Prune to the end; yield how many leases each transaction deleted."""
    before = rows(Lease).count()
    while True:
        done = do(store.prune, state, wall.advance(1))
        after = rows(Lease).count()
        yield before - after
        before = after
        if not done.more:
            return


def test_a_job_with_a_long_ledger_is_pruned_in_bounded_bites_and_never_condemned(
    wall: Wall,
) -> None:
    short, job_id = enqueue_each(2)
    add_leases(job_id, LONG)
    for held in claim(2):
        ack(held)
    bites = pruned_away(State.SUCCEEDED, wall)
    next(bites)
    assert not rows(Job).filter(pk=short).exists(), "what fits goes at once"
    next(bites)
    assert faults() == []
    assert leases_of(job_id) > LONG // 2
    deleted = list(bites)
    assert max(deleted) <= MOST_LEASES
    assert len(deleted) < 2 * LONG // MOST_LEASES, "and each bite deletes about as many as it may"
    assert not rows(Job).exists()
    assert not rows(Lease).exists()
    assert_counters_exact()


@pytest.mark.parametrize("outcome", ["snoozed", "failed"])
def test_each_state_between_two_bites_is_one_that_verify_knows(outcome: str, wall: Wall) -> None:
    job_id = enqueue()
    add_leases(job_id, 3 * MOST_LEASES + 1, outcome)
    ack(claim_one())
    for deleted in pruned_away(State.SUCCEEDED, wall):
        assert 0 < deleted <= MOST_LEASES
        assert faults() == []
        assert leases_of(job_id) == 0 or leases_of(job_id) >= KEPT_LEASES
    assert not rows(Job).exists()


def test_jobs_whose_ledgers_fit_together_go_together(wall: Wall) -> None:
    for job_id in enqueue_each(8):
        add_leases(job_id, 299)
    for held in claim(8):
        ack(held)
    assert list(pruned_away(State.SUCCEEDED, wall)) == [600, 900, 900]


def test_a_dead_letter_that_is_requeued_between_two_bites_runs_and_is_not_condemned(
    wall: Wall,
) -> None:
    job_id = enqueue()
    add_leases(job_id, 2 * MOST_LEASES, "failed")
    nack(claim_one(), fatal=True)
    assert do(store.prune, State.DEAD, wall.advance(1)) == (0, True)
    assert do(store.requeue, [job_id]).job_ids == [job_id]
    ack(claim_one())
    assert faults() == []


def test_a_short_ledger_that_lacks_its_oldest_lease_is_condemned(wall: Wall) -> None:
    job_id = enqueue()
    add_leases(job_id, 10, "failed")
    ack(claim_one())
    rows(Lease).filter(job=job_id, attempt=1).delete()
    assert faults() != []


def test_a_ledger_with_a_hole_is_condemned_however_long_it_is(wall: Wall) -> None:
    job_id = enqueue()
    add_leases(job_id, 2 * KEPT_LEASES, "failed")
    ack(claim_one())
    assert faults() == []
    rows(Lease).filter(job=job_id, attempt=KEPT_LEASES).delete()
    assert faults() != []


def test_verify_reads_a_bounded_number_of_leases_in_one_look(
    wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_ids = enqueue_each(8)
    for job_id in job_ids:
        add_leases(job_id, 30)
    looks: list[tuple[int, int]] = []
    ledger_faults = verification._ledger_faults

    def look(after: int, end: int) -> Iterator[Any]:
        looks.append((after, end))
        return ledger_faults(after, end)

    monkeypatch.setattr(verification, "LEASES_PER_RANGE", 60)
    monkeypatch.setattr(verification, "_ledger_faults", look)
    rows(Job).filter(pk=job_ids[3]).update(attempt=1)
    assert len(faults()) == 1
    for after, end in looks:
        assert rows(Lease).filter(job__gt=after, job__lte=end).count() <= 60
    assert sum(end - after for after, end in looks) == job_ids[-1], "each id is looked at once"


def test_a_discard_deletes_a_bounded_number_of_leases_in_each_transaction(wall: Wall) -> None:
    short, long, last = enqueue_each(3)
    add_leases(long, 10 * MOST_LEASES, "failed")
    for held in claim(3):
        nack(held, fatal=True)
    before, most, done = rows(Lease).count(), 0, store.Changed()
    for changed in DISCARD.change([short, long, last, 987]):
        after = rows(Lease).count()
        most, before = max(most, before - after), after
        done.add(changed)
    assert 0 < most <= MOST_LEASES
    assert sorted(done.job_ids) == [short, long, last]
    assert set(done.before) == {short, long, last}
    assert done.missing == [987], "told once"
    assert not rows(Lease).exists()
    assert_counters_exact()


def test_one_dead_letter_with_a_long_ledger_is_discarded_by_one_call(wall: Wall) -> None:
    job_id = enqueue()
    add_leases(job_id, 3 * MOST_LEASES, "failed")
    nack(claim_one(), fatal=True)
    api.discard(job_id)
    assert not rows(Job).exists()
    assert_counters_exact()


def snooze(times: int, wall: Wall) -> None:
    for _ in range(times):
        held = claim_one()
        do(store.snooze, held.lease_id, held.token, 0.0)
        wall.advance(1)
        do(store.promote)


def test_a_job_that_snoozes_for_ever_keeps_its_newest_leases_and_its_verdict(wall: Wall) -> None:
    job_id = enqueue(max_attempts=2)
    nack(claim_one(), delay_seconds=0.0)
    do(store.promote)
    most = 0
    for _ in range(3 * KEPT_LEASES + 10):
        snooze(1, wall)
        most = max(most, leases_of(job_id))
    newest = rows(Lease).latest("id").pk
    assert most <= 2 * KEPT_LEASES + 1
    assert KEPT_LEASES < leases_of(job_id) <= most
    assert rows(Lease).filter(job=job_id, outcome="failed").count() == 1, "it was charged"
    assert rows(Lease).filter(pk__gt=newest - KEPT_LEASES).count() == KEPT_LEASES
    assert ledger.annotate_verdict(rows(Job)).get().verdict == "repeated"
    ack(claim_one())
    assert faults() == []
    assert_counters_exact()


def test_an_old_long_ledger_of_a_living_job_shrinks_by_bounded_statements(wall: Wall) -> None:
    job_id = enqueue()
    add_leases(job_id, 5 * MOST_LEASES)
    before = leases_of(job_id)
    for _ in range(8):
        snooze(1, wall)
        after = leases_of(job_id)
        assert before - after <= MOST_LEASES
        before = after
        assert faults() == []
    assert before <= 2 * KEPT_LEASES


def test_an_uncharged_lease_whose_owner_came_back_late_stays(wall: Wall) -> None:
    job_id = enqueue()
    add_leases(job_id, 1, "released")
    rows(Lease).update(refused_verb="ack", refused_at=wall.now)
    evidence = rows(Lease).get().pk
    add_leases(job_id, 3 * KEPT_LEASES, "released")
    held = claim_one()
    do(store.release, held.lease_id, held.token)
    assert leases_of(job_id) == KEPT_LEASES + 1
    assert rows(Lease).filter(pk=evidence).exists()


def test_a_job_of_another_outcome_and_its_neighbours_lose_nothing(wall: Wall) -> None:
    first, second = enqueue_each(2)
    add_leases(first, 3 * KEPT_LEASES, "failed")
    add_leases(second, 3 * KEPT_LEASES)
    (held,) = [held for held in claim(2) if held.job_id == first]
    do(store.snooze, held.lease_id, held.token, 0.0)
    assert (leases_of(first), leases_of(second)) == (3 * KEPT_LEASES + 1, 3 * KEPT_LEASES + 1)


def test_a_settlement_that_is_charged_looks_at_no_older_lease(wall: Wall) -> None:
    enqueue_each(2)
    acked, failed = claim(2)
    alias = conf.get().database
    with connections[alias].execute_wrapper(_no_long_ledgers):
        ack(acked)
        nack(failed)


def _no_long_ledgers(execute: Any, sql: str, *rest: Any) -> Any:
    assert "OFFSET" not in sql
    return execute(sql, *rest)
