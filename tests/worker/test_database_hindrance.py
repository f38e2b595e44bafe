"""What keeps a worker from its work: tried once more at once, then said once, with growing pauses."""

from __future__ import annotations

import pytest
from django.db import IntegrityError

from relay_queue.worker.database import MAX_PAUSE_SECONDS, Hindrance

ERROR = IntegrityError("no\nDETAIL:  Failing row contains (7, secret).")


def test_the_first_failure_is_tried_again_at_once_and_has_no_reason() -> None:
    hindrance = Hindrance()
    assert hindrance.meet({"claim jobs": ERROR}) == 0.0
    assert (bool(hindrance), hindrance.reason) == (True, "")


def test_pauses_grow_up_to_a_bound() -> None:
    hindrance = Hindrance()
    pauses = [hindrance.meet({"claim jobs": ERROR}) for _ in range(12)]
    assert pauses == sorted(pauses)
    assert (pauses[1] > 0, pauses[-1]) == (True, MAX_PAUSE_SECONDS)


def test_the_reason_is_said_once_in_one_line_without_the_values_of_a_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hindrance = Hindrance()
    for _ in range(5):
        hindrance.meet({"claim jobs": ERROR})
    assert hindrance.reason == "cannot claim jobs: IntegrityError: no"
    assert caplog.text.count("Cannot claim jobs") == 1
    assert "secret" not in caplog.text


def test_what_passes_again_is_forgotten_and_the_rest_is_not() -> None:
    hindrance = Hindrance()
    for _ in range(2):
        hindrance.meet({"claim jobs": ERROR, "renew leases": ERROR})
    hindrance.passed(["claim jobs", "wake jobs"])
    assert hindrance.reason == "cannot renew leases: IntegrityError: no"
    hindrance.passed(["renew leases"])
    assert (bool(hindrance), hindrance.reason) == (False, "")
    assert hindrance.meet({"claim jobs": ERROR}) == 0.0
