"""A verdict says how often a function ran, and no more than the ledger knows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from relay_queue.states import Outcome
from relay_queue.verdict import CUT_SHORT, Verdict, judge


@dataclass(frozen=True)
class Ended:
    """A lease as the verdict sees it: how it ended, and the verb of a late return."""

    outcome: str | None
    refused_verb: str = ""


def ledger(*outcomes: str | None) -> list[Ended]:
    """Return leases from words like ``lost`` or, with a late return, ``expired+ack``."""
    parts = [(outcome or "").partition("+") for outcome in outcomes]
    return [Ended(outcome or None, verb) for outcome, _, verb in parts]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ((), Verdict.NEVER_STARTED),
        ((None,), Verdict.RUNNING),
        (("acked",), Verdict.RAN_ONCE),
        (("failed",), Verdict.RAN_ONCE),
        (("fatal",), Verdict.RAN_ONCE),
        (("snoozed",), Verdict.RAN_ONCE),
        (("lost",), Verdict.INTERRUPTED),
        (("expired",), Verdict.INTERRUPTED),
        (("timed_out",), Verdict.INTERRUPTED),
        (("cancelled",), Verdict.INTERRUPTED),
        (("released",), Verdict.INTERRUPTED),
        (("unrun",), Verdict.NEVER_STARTED),
        (("unrun", None), Verdict.RUNNING),
        (("unrun", "acked"), Verdict.RAN_ONCE),
        (("unrun", "failed", "acked"), Verdict.RAN_AGAIN),
        (("lost", "acked"), Verdict.INTERRUPTED),
        (("lost", None), Verdict.INTERRUPTED),
        (("failed", "acked"), Verdict.RAN_AGAIN),
        (("snoozed", "acked"), Verdict.RAN_AGAIN),
        (("failed", None), Verdict.RUNNING),
        (("failed", "lost", "acked"), Verdict.RAN_AGAIN),
    ],
)
def test_verdict_follows_from_the_outcomes(
    outcomes: tuple[str | None, ...], expected: Verdict
) -> None:
    assert judge(ledger(*outcomes)) is expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (("expired+ack", "acked"), Verdict.RAN_AGAIN),
        (("expired+snooze", "acked"), Verdict.RAN_AGAIN),
        (("cancelled+ack",), Verdict.RAN_ONCE),
        (("expired+release", "acked"), Verdict.INTERRUPTED),
        # A worker says nack, too, of a function that ran past its time and has not ended.
        (("expired+nack", "acked"), Verdict.INTERRUPTED),
    ],
)
def test_a_late_ack_proves_that_the_function_ran_although_it_is_refused(
    outcomes: tuple[str, ...], expected: Verdict
) -> None:
    assert judge(ledger(*outcomes)) is expected


def test_every_outcome_but_one_is_an_answer_or_cuts_short() -> None:
    for outcome in set(Outcome) - {Outcome.UNRUN}:
        expected = Verdict.INTERRUPTED if outcome in CUT_SHORT else Verdict.RAN_ONCE
        assert judge(ledger(outcome.value)) is expected
