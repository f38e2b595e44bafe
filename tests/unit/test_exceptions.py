"""Messages of errors, whatever the number is that they are about."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from relay_queue import conf
from relay_queue.backoff import Backoff
from relay_queue.exceptions import InvalidJob, JobNotFound, Retry, Snooze, shown

HUGE = 10**5_000
"""More digits than Python prints, and more than a float holds."""

SAYINGS: dict[str, Callable[[], str]] = {
    "a job that is not there": lambda: str(JobNotFound(HUGE)),
    "a retry": lambda: str(Retry(after_seconds=HUGE)),
    "a snooze": lambda: str(Snooze(HUGE)),
    "a back-off": lambda: refusal(lambda: Backoff(base_seconds=HUGE)),
    "a setting": lambda: str(conf.problems({"MAX_ATTEMPTS": HUGE})[0]),
}


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(InvalidJob) as refused:
        act()
    return str(refused.value)


@pytest.mark.parametrize("say", SAYINGS.values(), ids=SAYINGS.keys())
def test_a_number_too_long_to_print_is_told_by_its_size(say: Callable[[], str]) -> None:
    assert "an integer of 16610 bits" in say()


def test_a_number_is_told_as_it_is_up_to_80_characters() -> None:
    assert shown(2**63) == str(2**63)
    assert shown(10**200) == "1" + "0" * 79 + "…"


def test_a_delay_is_told_in_seconds() -> None:
    assert str(Retry(after_seconds=1.5)) == "retry after 1.5 s"
    assert str(Snooze(60)) == "snooze for 60 s"
    # What is no number of seconds is refused by the worker, which says what to use.
    assert "datetime.timedelta(seconds=60)" in str(Snooze(timedelta(minutes=1)))  # type: ignore[arg-type]
    assert "'soon'" in str(Retry(after_seconds="soon"))  # type: ignore[arg-type]
