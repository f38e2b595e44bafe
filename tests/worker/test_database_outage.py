"""What is said while a process waits for its database."""

from __future__ import annotations

import logging

import pytest

from relay_queue.worker import database
from relay_queue.worker.database import Outage
from tests.worker.monotonic import Monotonic, stop_time

logger = logging.getLogger("relay_queue.worker")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Monotonic:
    return stop_time(monkeypatch, database)


def test_an_absence_is_said_at_once_and_then_ever_more_rarely(
    clock: Monotonic, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Outage(logger)
    said = []
    for second in range(4000):
        waiting.goes_on("no\nroute")
        said += [second] * len(caplog.messages)
        caplog.clear()
        clock.advance(1)
    assert said == [0, 10, 30, 70, 150, 310, 630, 1230, 1830, 2430, 3030, 3630]
    waiting.is_over()
    assert caplog.messages == ["The database is reached after 4000 s."]


def test_a_writer_that_others_hold_is_worth_a_line_after_five_seconds(
    clock: Monotonic, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Outage(logger)
    for _ in range(5):
        waiting.goes_on("locked", "busy")
        clock.advance(1)
    waiting.is_over()
    assert caplog.messages == []
    for _ in range(6):
        waiting.goes_on("locked", "busy")
        clock.advance(1)
    assert caplog.messages == ["The database takes no writes; waiting for it, 5 s so far: locked"]
