"""How sessions are judged: seen free for a while, and never right after a loss of one's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relay_queue.store import inspect
from relay_queue.store.inspect import OtherWorker
from relay_queue.store.sessions import RESTART_GRACE_SECONDS, lock_key
from relay_queue.worker import siblings as module
from relay_queue.worker.siblings import CONFIRM_SECONDS, DeadSiblings

ONE = OtherWorker(1, "a" * 32, None, None, True)
TWO = OtherWorker(2, "0123456789abcdef" * 2, None, None, True)
FILE = OtherWorker(3, "c" * 32, 4, 5, False)
NOTHING = OtherWorker(4, "d" * 32, None, None, False)

pytestmark = pytest.mark.django_db


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the keys that nobody holds; a test changes it."""
    keys: set[int] = set()
    monkeypatch.setattr(inspect, "live_workers", lambda but: [ONE, TWO, FILE, NOTHING])
    monkeypatch.setattr(inspect, "unlocked", keys.intersection)
    return keys


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]

    def later(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return later


def test_a_key_is_a_signed_number_made_from_the_incarnation() -> None:
    assert lock_key("0123456789abcdef" * 2) == 0x0123456789ABCDEF
    assert lock_key("f" * 32) == -1


@pytest.mark.parametrize(
    "altered", ["g" * 32, "A" * 32, "a" * 31, "a" * 33, "", "a" * 32 + "\n", None, 7]
)
def test_what_is_no_incarnation_has_no_key(altered: object) -> None:
    assert lock_key(altered) is None


def test_a_worker_whose_row_was_altered_is_judged_by_nobody_and_hides_no_other(
    free: set[int], advance: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = OtherWorker(9, "no hex", None, None, True)
    monkeypatch.setattr(inspect, "live_workers", lambda but: [altered, TWO])
    dead = DeadSiblings()
    free.add(lock_key(TWO.incarnation) or 0)
    for _ in range(2):
        dead.find("default", 0)
        advance(CONFIRM_SECONDS)
    assert list(dead.probes) == [2]


def test_a_lock_must_be_seen_free_twice(free: set[int], advance: Callable[[float], None]) -> None:
    dead = DeadSiblings()
    free.add(lock_key(TWO.incarnation))
    dead.find("default", 0)
    assert (list(dead.suspects), dead.probes) == ([2], {})
    advance(CONFIRM_SECONDS)
    dead.find("default", 0)
    assert (dead.suspects, list(dead.probes)) == ({}, [2])


def test_a_worker_that_takes_its_lock_again_is_a_suspect_no_more(
    free: set[int], advance: Callable[[float], None]
) -> None:
    dead = DeadSiblings()
    free.add(lock_key(ONE.incarnation))
    dead.find("default", 0)
    free.clear()
    advance(CONFIRM_SECONDS)
    dead.find("default", 0)
    free.add(lock_key(ONE.incarnation))
    dead.find("default", 0)
    assert (list(dead.suspects), dead.probes) == ([1], {}), "the time begins anew"


def test_after_a_loss_of_our_own_nobody_is_judged_for_a_while(
    free: set[int], advance: Callable[[float], None]
) -> None:
    dead = DeadSiblings()
    free.update((lock_key(ONE.incarnation), lock_key(TWO.incarnation)))
    dead.find("default", 0)
    dead.doubt()
    for _ in range(9):
        advance(RESTART_GRACE_SECONDS / 10)
        dead.find("default", 0)
    assert (dead.suspects, dead.probes) == ({}, {})
    advance(RESTART_GRACE_SECONDS / 10)
    dead.find("default", 0)
    assert sorted(dead.suspects) == [1, 2]
