"""What ends the sleep of a loop."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay_queue.wakeup import Doorbell, doorbell
from relay_queue.worker.options import DRAIN, LOOK, QUIT, READY
from relay_queue.worker.waiting import Waiting, Woken

LONG_SECONDS = 60.0


@pytest.fixture
def supervisor() -> Iterator[socket.socket]:
    """Return the supervisor's end; the worker's is the attribute ``worker`` of the next fixture."""
    ours, theirs = socket.socketpair()
    _ends[ours.fileno()] = theirs
    yield ours
    ours.close()
    theirs.close()


_ends: dict[int, socket.socket] = {}


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "relay.sqlite3"
    path.touch()
    return str(path)


@pytest.fixture
def waiting(supervisor: socket.socket, database: str) -> Iterator[Waiting]:
    bell = Doorbell(database, "bell")
    waiting = Waiting(_ends[supervisor.fileno()].fileno())
    waiting.listen_to(bell)
    yield waiting
    waiting.close()
    bell.close()


def quiet(woken: Woken) -> bool:
    """Whether there was no reason to wake."""
    return not (woken.rung or woken.look or woken.drain or woken.quit)


def test_time_alone_ends_a_sleep_without_a_reason(waiting: Waiting) -> None:
    assert quiet(waiting.wait(0.01))


def test_many_rings_are_one_reason_and_used_up(waiting: Waiting, database: str) -> None:
    for _ in range(5):
        doorbell.ring(database)
    assert waiting.wait(LONG_SECONDS).rung
    assert quiet(waiting.wait(0))


@pytest.mark.parametrize(("order", "name"), [(DRAIN, "drain"), (QUIT, "quit"), (LOOK, "look")])
def test_an_order_ends_the_sleep(
    waiting: Waiting, supervisor: socket.socket, order: bytes, name: str
) -> None:
    supervisor.send(order)
    woken = waiting.wait(LONG_SECONDS)
    assert getattr(woken, name)
    assert quiet(waiting.wait(0))


def test_orders_that_came_together_are_all_heard(
    waiting: Waiting, supervisor: socket.socket
) -> None:
    supervisor.send(LOOK + DRAIN + QUIT)
    woken = waiting.wait(LONG_SECONDS)
    assert (woken.look, woken.drain, woken.quit) == (True, True, True)


def test_the_end_of_the_supervisor_is_an_order_to_drain_and_makes_no_busy_loop(
    waiting: Waiting, supervisor: socket.socket
) -> None:
    supervisor.close()
    woken = waiting.wait(LONG_SECONDS)
    assert (woken.drain, woken.quit) == (True, False)
    assert quiet(waiting.wait(0.01)), "it is told once; the next sleep lasts"


def test_the_supervisor_hears_what_is_said_and_its_end_is_no_error(
    waiting: Waiting, supervisor: socket.socket
) -> None:
    waiting.say(READY)
    assert supervisor.recv(8) == READY
    supervisor.close()
    waiting.say(READY)


def test_a_slot_ends_the_sleep_from_its_own_thread(waiting: Waiting) -> None:
    thread = threading.Thread(target=waiting.wake)
    began = time.monotonic()
    thread.start()
    assert quiet(waiting.wait(LONG_SECONDS))
    thread.join()
    assert time.monotonic() - began < LONG_SECONDS
    assert quiet(waiting.wait(0.01))


def test_a_wake_never_blocks_its_slot(waiting: Waiting) -> None:
    for _ in range(100_000):  # more than a pipe holds
        waiting.wake()
    assert quiet(waiting.wait(LONG_SECONDS))


def test_a_sleep_that_lasted_longer_than_asked_for_says_so(
    waiting: Waiting, supervisor: socket.socket
) -> None:
    assert waiting.wait(0.01).late_seconds < LONG_SECONDS
    supervisor.send(LOOK)
    assert waiting.wait(LONG_SECONDS).late_seconds < 0, "woken early is not late"


def test_without_a_bell_orders_and_slots_still_end_the_sleep(supervisor: socket.socket) -> None:
    waiting = Waiting(_ends[supervisor.fileno()].fileno())
    supervisor.send(LOOK)
    assert waiting.wait(LONG_SECONDS).look
    waiting.wake()
    assert quiet(waiting.wait(LONG_SECONDS))
    waiting.close()


@pytest.mark.usefixtures("files_stay_open")
def test_closing_gives_every_descriptor_back_and_leaves_the_line_to_its_owner(
    supervisor: socket.socket,
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    Waiting(_ends[supervisor.fileno()].fileno()).close()
    assert set(os.listdir("/proc/self/fd")) == before
    supervisor.send(DRAIN)
    assert _ends[supervisor.fileno()].recv(8) == DRAIN


@pytest.mark.usefixtures("files_stay_open")
def test_a_function_that_returns_late_cannot_write_into_a_file_that_got_the_pipes_number(
    supervisor: socket.socket, tmp_path: Path
) -> None:
    waiting = Waiting(_ends[supervisor.fileno()].fileno())
    before = set(os.listdir("/proc/self/fd"))
    waiting.close()
    files = [(tmp_path / str(number)).open("w+b") for number in range(8)]
    waiting.wake()
    assert [os.path.getsize(file.name) for file in files] == [0] * 8
    for file in files:
        file.close()
    assert set(os.listdir("/proc/self/fd")) < before


def test_a_slot_whose_outcome_was_taken_before_it_rang_cannot_write_elsewhere(
    supervisor: socket.socket,
) -> None:
    waiting = Waiting(_ends[supervisor.fileno()].fileno())
    # A slot puts its outcome down, the loop takes it and leaves, and only then the slot wakes it.
    waiting.close()
    waiting.wake()
