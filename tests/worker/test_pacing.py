"""How much to claim, and whose turn it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relay_queue.store.records import Claim
from relay_queue.worker.pacing import Pace
from tests import tasks
from tests.worker.claims import claim_of


@pytest.fixture
def pace() -> Pace:
    made = Pace()
    made.more = True
    return made


def claims(count: int, queue: str = "default") -> list[Claim]:
    return [replace(claim_of(tasks.noop), queue=queue) for _ in range(count)]


def test_without_a_sign_of_work_it_asks_for_nothing() -> None:
    assert Pace().ask(8) == 0


def test_it_begins_with_one_and_doubles_while_the_queues_fill_the_claim(pace: Pace) -> None:
    asked = []
    for _ in range(6):
        asked.append(pace.ask(20))
        pace.learn(asked[-1], claims(asked[-1]))
    assert asked == [1, 2, 4, 8, 16, 20]


def test_it_never_asks_for_more_than_there_is_room_for(pace: Pace) -> None:
    for _ in range(10):
        pace.learn(pace.ask(3), claims(pace.ask(3)))
    assert pace.ask(3) == 3
    assert pace.ask(0) == 0


def test_a_claim_that_was_not_filled_ends_the_asking_and_starts_anew_with_one(pace: Pace) -> None:
    for _ in range(3):
        pace.learn(pace.ask(8), claims(pace.ask(8)))
    pace.learn(8, claims(5))
    assert pace.ask(8) == 0
    pace.more = True
    assert pace.ask(8) == 1


def test_a_claim_that_was_never_made_teaches_nothing(pace: Pace) -> None:
    pace.learn(1, claims(1))
    pace.learn(0, [])
    assert pace.ask(8) == 2


def test_the_size_has_an_end(pace: Pace) -> None:
    for _ in range(100):
        pace.learn(1, claims(1))
    assert pace.ask(1 << 40) == 1 << 16


def test_the_ring_goes_on_behind_the_queue_that_was_dealt_to_last(pace: Pace) -> None:
    queues = ["a", "b", "c"]
    assert pace.ring(queues) == ["a", "b", "c"]
    pace.learn(2, [*claims(1, "a"), *claims(1, "b")])
    assert pace.ring(queues) == ["c", "a", "b"]
    pace.learn(1, claims(1, "c"))
    assert pace.ring(queues) == ["a", "b", "c"]


def test_the_ring_survives_a_queue_that_is_gone_and_a_claim_without_jobs(pace: Pace) -> None:
    pace.learn(1, claims(1, "b"))
    pace.learn(1, [])
    assert pace.ring(["a", "b", "c"]) == ["c", "a", "b"]
    assert pace.ring(["a", "c"]) == ["a", "c"]
    assert pace.ring([]) == []
