"""What a running function can know of its job, and how it hears that it should stop."""

from __future__ import annotations

import dataclasses
from time import monotonic

import pytest

from relay_queue.context import TIMED_OUT, JobContext, current_context
from relay_queue.exceptions import Cancelled, TimedOut
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.executor import execute
from tests import tasks
from tests.worker.claims import claim_of


def context_with(deadline: float | None = None) -> JobContext:
    return JobContext(job_id=1, queue="q", attempt=2, epoch=3, deadline=deadline)


def test_context_without_a_deadline_goes_on() -> None:
    context = context_with()
    context.raise_if_cancelled()
    assert not context.cancelled
    assert context.remaining_seconds() is None


def test_first_reason_to_cancel_stays() -> None:
    context = context_with()
    context.cancel("by an operator")
    context.cancel("the lease is lost")
    assert context.cancelled
    with pytest.raises(Cancelled, match="job 1 should stop: by an operator"):
        context.raise_if_cancelled()


def test_cancelling_without_a_reason_still_cancels() -> None:
    context = context_with()
    context.cancel("")
    assert context.cancelled


def test_passed_deadline_is_a_timeout_without_being_told() -> None:
    context = context_with(monotonic())
    assert context.cancelled
    assert context.timed_out
    assert context.remaining_seconds() == 0
    with pytest.raises(TimedOut, match="job 1 ran out of time in attempt 2"):
        context.raise_if_cancelled()


def test_timeout_told_by_the_loop_is_a_timeout() -> None:
    context = context_with()
    context.cancel(TIMED_OUT)
    with pytest.raises(TimedOut):
        context.raise_if_cancelled()


def test_deadline_ahead_leaves_time() -> None:
    remaining = context_with(monotonic() + 60).remaining_seconds()
    assert remaining is not None
    assert 0 < remaining <= 60


def test_context_of_a_claim_starts_its_time_limit() -> None:
    claim = dataclasses.replace(claim_of(tasks.noop), timeout_seconds=60.0)
    before = monotonic()
    context = JobContext.of(claim, "worker")
    assert (context.job_id, context.epoch) == (claim.job_id, claim.lease_id)
    assert (context.attempt, context.idempotency_key, context.worker) == (1, "key", "worker")
    assert context.deadline is not None
    assert before + 60 <= context.deadline <= monotonic() + 60


def test_there_is_no_current_job_outside_of_jobs() -> None:
    claim = claim_of(tasks.noop)
    execute(Attempt(claim, JobContext.of(claim)))
    assert current_context() is None
