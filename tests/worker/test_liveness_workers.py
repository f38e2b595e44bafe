"""How sessions are judged: seen free for a while, and never right after a loss of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relay_queue.query import looks, reads
from relay_queue.query.looks import OtherWorker
from relay_queue.store.workers import RESTART_GRACE_SECONDS, lock_key
from relay_queue.worker import liveness as module
from relay_queue.worker.liveness import (
    CONFIRM_SECONDS,
    WATCHED,
    DeadWorkers,
    LivenessLock,
    LockIdentity,
    Probe,
    probe,
)
from tests.store.actions import register

ONE = OtherWorker(1, "a" * 32, None, None, True)
TWO = OtherWorker(2, "0123456789abcdef" * 2, None, None, True)
FILE = OtherWorker(3, "c" * 32, 4, 5, False)
NOTHING = OtherWorker(4, "d" * 32, None, None, False)

pytestmark = pytest.mark.django_db


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the keys that nobody holds; a test changes it."""
    keys: set[int] = set()
    monkeypatch.setattr(looks, "live_workers", lambda but: [ONE, TWO, FILE, NOTHING])
    monkeypatch.setattr(looks, "unlocked", keys.intersection)
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
    monkeypatch.setattr(looks, "live_workers", lambda but: [altered, TWO])
    dead = DeadWorkers()
    free.add(lock_key(TWO.incarnation) or 0)
    for _ in range(2):
        dead.find("default", 0)
        advance(CONFIRM_SECONDS)
    assert list(dead.probes) == [2]


def test_a_lock_must_be_seen_free_twice(free: set[int], advance: Callable[[float], None]) -> None:
    dead = DeadWorkers()
    free.add(lock_key(TWO.incarnation))
    dead.find("default", 0)
    assert (list(dead.suspects), dead.probes) == ([2], {})
    advance(CONFIRM_SECONDS)
    dead.find("default", 0)
    assert (dead.suspects, list(dead.probes)) == ({}, [2])


def test_a_worker_that_takes_its_lock_again_is_a_suspect_no_more(
    free: set[int], advance: Callable[[float], None]
) -> None:
    dead = DeadWorkers()
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
    dead = DeadWorkers()
    free.update((lock_key(ONE.incarnation), lock_key(TWO.incarnation)))
    dead.find("default", 0)
    dead.suspend_judgement()
    for _ in range(9):
        advance(RESTART_GRACE_SECONDS / 10)
        dead.find("default", 0)
    assert (dead.suspects, dead.probes) == ({}, {})
    advance(RESTART_GRACE_SECONDS / 10)
    dead.find("default", 0)
    assert sorted(dead.suspects) == [1, 2]


# --- The ring -------------------------------------------------------------------------------

CROWD = 60


@dataclass
class Crowd:
    """Registered workers with real locks, and how often anybody looked."""

    locks: dict[int, LivenessLock]
    probed: list[str] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    def kill(self, *worker_ids: int) -> None:
        """Drop the locks of workers as the kernel does: their files stay."""
        for worker_id in worker_ids:
            descriptor = self.locks[worker_id]._descriptor
            assert descriptor is not None
            descriptor.close()

    def finders(self) -> dict[int, list[int]]:
        """Let each living worker probe; return who has found which of the dead."""
        found: dict[int, list[int]] = {}
        for worker_id, lock in self.locks.items():
            if lock._descriptor is None or lock._descriptor.number < 0:
                continue
            dead = DeadWorkers()
            dead.find("default", worker_id)
            for other in dead.probes:
                found.setdefault(other, []).append(worker_id)
            dead.close()
        return found


@pytest.fixture
def crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    database = tmp_path / "relay.sqlite3"
    database.touch()
    monkeypatch.setattr(module, "database_path", lambda using: str(database))
    locks = {}
    for number in range(CROWD):
        name = f"{number:032x}"
        lock = LivenessLock.hold(str(database), name)
        device, inode = lock.identity.device, lock.identity.inode
        locks[register(incarnation=name, lock_device=device, lock_inode=inode)] = lock
    crowd = Crowd(locks)

    def probing(path: str, incarnation: str, identity: LockIdentity) -> Probe:
        crowd.probed.append(incarnation)
        return probe(path, incarnation, identity)

    fetch = reads.rows

    def fetching(statement: str, *params: Any) -> list[tuple[Any, ...]]:
        rows = fetch(statement, *params)
        crowd.read.append(len(rows))
        return rows

    monkeypatch.setattr(module, "probe", probing)
    monkeypatch.setattr(reads, "rows", fetching)
    yield crowd
    for lock in locks.values():
        lock.release()


def test_the_work_of_all_idle_workers_grows_with_their_number_only(crowd: Crowd) -> None:
    assert crowd.finders() == {}
    assert len(crowd.probed) == CROWD * WATCHED
    assert sum(crowd.read) <= CROWD * 2 * looks.AT_ONCE
    assert len(crowd.read) <= CROWD * 2


@pytest.mark.parametrize("first", [0, 20, CROWD - 4], ids=["first", "middle", "across the end"])
def test_every_run_of_dead_workers_is_found_by_the_three_living_before_it(
    crowd: Crowd, first: int
) -> None:
    ids = list(crowd.locks)
    ring = ids[first:] + ids[:first]
    dead = ring[:10]
    crowd.kill(*dead)
    found = crowd.finders()
    assert sorted(found) == sorted(dead)
    assert {tuple(sorted(finders)) for finders in found.values()} == {tuple(sorted(ring[-3:]))}


def test_dead_workers_between_living_ones_are_all_found(crowd: Crowd) -> None:
    dead = list(crowd.locks)[::2]
    crowd.kill(*dead)
    found = crowd.finders()
    assert sorted(found) == dead
    assert {len(finders) for finders in found.values()} == {WATCHED}


def test_the_last_one_living_finds_all_the_others(crowd: Crowd) -> None:
    *dead, last = crowd.locks
    crowd.kill(*dead)
    assert crowd.finders() == {worker_id: [last] for worker_id in dead}
