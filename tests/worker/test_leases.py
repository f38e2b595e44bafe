"""What a worker believes of its leases, on the monotonic clock."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from relay_queue.context import GRACE_SECONDS, JobContext
from relay_queue.store.records import Claim
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.leases import Leases
from tests import tasks
from tests.worker.claims import claim_of

SINCE = 100.0


@pytest.fixture
def leases() -> Leases:
    return Leases()


def grant(leases: Leases, deadline: float | None = None, **changes: Any) -> Claim:
    """Hold a new lease since the time ``SINCE``."""
    claim = replace(claim_of(tasks.noop), **changes)
    context = JobContext.of(claim)
    context.deadline = deadline
    leases.add(Attempt(claim, context, SINCE + claim.lease_seconds))
    return claim


def ids(attempts: list[Attempt]) -> list[int]:
    return [each.claim.lease_id for each in attempts]


def test_a_lease_is_renewed_when_half_of_it_is_over(leases: Leases) -> None:
    claim = grant(leases, lease_seconds=60)
    assert leases.next_event(SINCE) == SINCE + 30
    assert leases.to_renew(SINCE + 29.9) == []
    assert ids(leases.to_renew(SINCE + 30)) == [claim.lease_id]


def test_neighbours_that_are_nearly_due_are_renewed_in_the_same_write(leases: Leases) -> None:
    first = grant(leases, lease_seconds=60)
    near = grant(leases, lease_seconds=70)
    far = grant(leases, lease_seconds=100)
    assert ids(leases.to_renew(SINCE + 30)) == [first.lease_id, near.lease_id]
    assert far.lease_id in leases


def test_a_renewed_lease_lasts_from_the_moment_it_was_wanted(leases: Leases) -> None:
    claim = grant(leases, lease_seconds=60)
    leases.renewed([claim.lease_id], SINCE + 40)
    assert leases.expired(SINCE + 99.9) == []
    assert ids(leases.expired(SINCE + 100)) == [claim.lease_id]


def test_a_lease_that_was_not_renewed_is_gone_at_its_end(leases: Leases) -> None:
    claim = grant(leases, lease_seconds=1)
    assert leases.expired(SINCE + 0.9) == []
    assert ids(leases.expired(SINCE + 1)) == [claim.lease_id]


def test_a_function_is_overdue_at_its_deadline_and_one_without_is_never(leases: Leases) -> None:
    grant(leases)
    claim = grant(leases, deadline=SINCE + 5)
    limit = SINCE + 5 + GRACE_SECONDS  # a function that heeds its deadline says so itself
    assert leases.past_timeout(limit - 0.01) == []
    assert ids(leases.past_timeout(limit)) == [claim.lease_id]
    assert leases.next_event(SINCE) == limit


def test_a_lease_that_was_dropped_is_neither_renewed_nor_overdue(leases: Leases) -> None:
    claim = grant(leases, deadline=SINCE)
    dropped = leases.drop(claim.lease_id)
    assert dropped is not None
    assert dropped.claim is claim
    assert leases.drop(claim.lease_id) is None
    assert (
        leases.past_timeout(SINCE + 1)
        == leases.to_renew(SINCE + 999)
        == leases.expired(SINCE + 999)
    )
    assert (leases.next_event(SINCE + 1_000), len(leases), leases.ids()) == (None, 0, set())


def test_jobs_that_cost_two_owners_are_counted_as_suspects(leases: Leases) -> None:
    grant(leases, suspect=False)
    assert leases.suspects() == 0
    suspect = grant(leases, suspect=True)
    assert leases.suspects() == 1
    leases.drop(suspect.lease_id)
    assert leases.suspects() == 0


def test_leases_may_be_dropped_while_one_goes_through_them(leases: Leases) -> None:
    for _ in range(3):
        grant(leases)
    for held in leases:
        leases.drop(held.claim.lease_id)
    assert len(leases) == 0


def test_a_clock_that_may_start_at_any_moment_is_looked_at_in_time(leases: Leases) -> None:
    claim = grant(leases, deadline=monotonic(), timeout_seconds=2.0, lease_seconds=1e6)
    (held,) = leases
    held.context.waits = True
    began = monotonic()
    assert leases.past_timeout(began + 1e9) == []
    latest = leases.next_event(began)
    assert latest is not None
    assert latest <= monotonic() + 2.0
    held.context.start_clock(2.0)
    assert held.context.deadline is not None
    assert held.context.deadline >= latest
    assert ids(leases.past_timeout(monotonic() + 3.0)) == [claim.lease_id]
