"""The line of work of the slots: nothing is lost, and no thread is woken for nothing."""

from __future__ import annotations

import threading

from relay_queue.worker.slots import WorkQueue
from tests.conftest import wait_until


def test_entries_come_out_in_order() -> None:
    line: WorkQueue[int] = WorkQueue()
    for number in range(5):
        line.put(number)
    assert line
    assert [line.get() for _ in range(5)] == list(range(5))
    assert not line


def test_every_entry_is_taken_once_however_many_threads_take() -> None:
    line: WorkQueue[int | None] = WorkQueue()
    taken: list[int] = []

    def serve() -> None:
        while (entry := line.get()) is not None:
            taken.append(entry)

    threads = [threading.Thread(target=serve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for number in range(20_000):
        line.put(number)
    for _ in threads:
        line.put(None)
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(taken) == list(range(20_000))


def test_an_entry_that_blocks_does_not_hold_up_the_next() -> None:
    line: WorkQueue[int] = WorkQueue()
    release = threading.Event()
    taken: list[int] = []

    def serve() -> None:
        while True:
            entry = line.get()
            taken.append(entry)
            if entry < 0:
                return
            release.wait(60)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(4):
        line.put(number)
    wait_until(lambda: len(taken) == 4, message="all four are taken while none has ended")
    release.set()
    for _ in threads:
        line.put(-1)
    for thread in threads:
        thread.join(timeout=60)
