"""The gate across real processes and forks."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

import pytest

from relay_queue.db import gate as gate_module
from relay_queue.db.gate import PATIENCE_SECONDS, GateTimeout, gate_for
from tests.conftest import wait_until
from tests.db.conftest import held_elsewhere, is_locked

spawn = multiprocessing.get_context("spawn")


def in_child(function) -> int:
    """Run ``function`` in a forked child and return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(function() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_neither_holds_nor_opens_its_parents_gate(
    database: Path, gate_path: Path
) -> None:
    gate = gate_for(database)
    with gate.acquire(1) as permit:

        def child() -> int:
            if gate.held_by_this_thread() or gate._file._gate != -1:
                return 2
            permit.release()
            return 0 if is_locked(gate_path) else 3

        assert in_child(child) == 0
        assert is_locked(gate_path)
    assert not is_locked(gate_path)


def test_a_forked_child_waits_for_its_parent_like_any_process(
    database: Path, gate_path: Path
) -> None:
    gate = gate_for(database)
    ready, go = os.pipe()
    with gate.acquire(1):
        pid = os.fork()
        if pid == 0:
            try:
                os.write(go, b"x")
                with gate.acquire(20):
                    os._exit(0)
            finally:
                os._exit(1)
        os.read(ready, 1)
    os.close(ready)
    os.close(go)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not is_locked(gate_path)


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_gate_shut(
    database: Path, gate_path: Path, tmp_path: Path
) -> None:
    grandchild = tmp_path / "grandchild"

    def parent() -> None:
        with gate_for(database).acquire(1):
            if os.fork() == 0:
                grandchild.write_text(str(os.getpid()))
            time.sleep(60)

    pid = os.fork()
    if pid == 0:
        try:
            parent()
        finally:
            os._exit(1)
    wait_until(lambda: grandchild.exists() and grandchild.read_text())
    assert is_locked(gate_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        assert not is_locked(gate_path)
    finally:
        os.kill(int(grandchild.read_text()), signal.SIGKILL)


def test_a_child_forked_during_a_wait_can_use_the_gate(database: Path, gate_path: Path) -> None:
    gate = gate_for(database)
    with held_elsewhere(gate_path) as holder:
        thread = threading.Thread(target=lambda: gate.acquire(20).release())
        thread.start()
        wait_until(lambda: gate._asked)
        ready, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(go, b"x")
                with gate.acquire(20):
                    os._exit(0)
            finally:
                os._exit(1)
        os.read(ready, 1)
        holder.kill()
        thread.join()
    os.close(ready)
    os.close(go)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextmanager
def stopped_while_next(database: Path, gate_path: Path) -> Iterator[int]:
    """Stop a child while it is next at the gate, and nobody has the gate; yield its pid.

    Once it goes on, the child waits its turn, holds the gate once and exits with 0.
    """
    gate_path.touch()
    with held_elsewhere(gate_path):
        pid = os.fork()
        if pid == 0:
            try:
                with gate_for(database).acquire(60):
                    os._exit(0)
            finally:
                os._exit(1)

        def is_stopped_while_next() -> bool:
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)
            if is_locked(f"{gate_path}-next"):
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        wait_until(is_stopped_while_next)
    try:
        wait_until(lambda: not is_locked(gate_path))
        assert is_locked(f"{gate_path}-next")
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_process_stopped_while_it_is_next_does_not_shut_the_gate(
    database: Path, gate_path: Path
) -> None:
    gate = gate_for(database)
    with stopped_while_next(database, gate_path) as pid:
        for _ in range(5):
            with gate.acquire(20) as permit:
                assert is_locked(gate_path)
            assert permit.waited_seconds < 10
            assert not is_locked(gate_path)
        assert is_locked(f"{gate_path}-next")
        permit = gate.acquire(20)
    # It goes on while the gate is held, and so does not get it.
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    assert is_locked(gate_path)
    permit.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    wait_until(lambda: not gate._asked)
    wait_until(lambda: not is_locked(gate_path))
    assert not is_locked(f"{gate_path}-next")


@pytest.mark.parametrize("first", [False, True])
def test_nor_does_it_for_one_who_waits_in_slices(
    database: Path, gate_path: Path, first: bool
) -> None:
    gate = gate_for(database)
    with stopped_while_next(database, gate_path) as pid:
        for _ in range(5):
            gate.acquire(0.25, first=first).release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def enter_alone(database: str, stop) -> None:
    """Enter the gate from two threads until told to stop; fail if ever somebody else is in."""
    gate = gate_for(database)
    inside = f"{database}-inside"
    failures: list[BaseException] = []

    def enter(timeout_seconds: float, first: bool) -> None:
        entered = 0
        try:
            while not stop.is_set() or not entered:
                with suppress(GateTimeout), gate.acquire(timeout_seconds, first=first):
                    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                    os.unlink(inside)
                    entered += 1
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=enter, args=arguments) for arguments in [(0.1, True), (20, False)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(1 if failures else 0)


def test_stopped_processes_come_back_without_two_of_them_at_once_behind_the_gate(
    database: Path, gate_path: Path
) -> None:
    """Whoever is stopped, holder, next or neither, and for however long."""
    stop = spawn.Event()
    processes = [spawn.Process(target=enter_alone, args=(str(database), stop)) for _ in range(3)]
    for process in processes:
        process.start()
    try:
        wait_until(gate_path.exists)
        for turn in range(12):
            pid = processes[turn % 3].pid
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.1 if turn % 2 else PATIENCE_SECONDS + 0.1)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)
        stop.set()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
    assert not is_locked(gate_path)
    assert not is_locked(f"{gate_path}-next")


def waiting_for(inode: int) -> list[int]:
    """Return the processes that wait for a lock on a file, as the system lists them."""
    # Such as ``1: -> FLOCK  ADVISORY  WRITE 4711 fe:00:2146689 0 EOF``; a holder has no arrow.
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return [
        int(field[5])
        for field in lines
        if field[1:3] == ["->", "FLOCK"] and field[6].endswith(f":{inode}")
    ]


def saturate(database: str, started, stop) -> None:
    """Write one-row transactions, one after the other, and note in each who waits meanwhile."""
    import sqlite3

    # Overdue requests go past the process that is next: not here, however slow the machine is.
    gate_module.PATIENCE_SECONDS = inf
    gate = gate_for(database)
    gate.acquire(60).release()
    at_gate, at_next = (os.stat(database + end).st_ino for end in ("-gate", "-gate-next"))
    plain = sqlite3.connect(database, isolation_level=None, timeout=60)
    plain.execute("PRAGMA synchronous=FULL")
    started.wait(60)
    while not stop.is_set():
        with gate.acquire(60):
            waiting = json.dumps([waiting_for(at_gate), waiting_for(at_next)])
            plain.execute("INSERT INTO t VALUES (?, ?)", (os.getpid(), waiting))
    plain.close()


def grants_until_in(writers: list[int], index: int, pid: int) -> int:
    """Return after how many more grants a process got in that waited at this one."""
    return writers.index(pid, index + 1) - index


@pytest.mark.skipif(sys.platform != "linux", reason="the system must list who waits")
def test_saturated_processes_get_their_turns_in_order_and_never_two_while_another_waits(
    database: Path,
) -> None:
    """Shares say less: they fall where the machine keeps a process from asking for its turn."""
    import sqlite3

    plain = sqlite3.connect(database)
    plain.execute("PRAGMA journal_mode=WAL")
    plain.execute("CREATE TABLE t (pid INTEGER, waiting TEXT)")
    started, stop = spawn.Barrier(4), spawn.Event()
    processes = [
        spawn.Process(target=saturate, args=(str(database), started, stop)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    in_line = "SELECT count(*) FROM t WHERE json_array_length(waiting, '$[1]') >= 2"
    wait_until(lambda: plain.execute(in_line).fetchone()[0] >= 200, timeout=120)
    stop.set()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    rows = plain.execute("SELECT pid, waiting FROM t ORDER BY rowid").fetchall()
    plain.close()
    writers = [pid for pid, _ in rows]
    seen = [(index, *json.loads(waiting)) for index, (_, waiting) in enumerate(rows)]
    # Whoever is next gets in next, so the holder does not come again while another waits.
    next_ones = [(index, pid) for index, at_gate, _ in seen for pid in at_gate]
    assert len(next_ones) >= 200
    assert {grants_until_in(writers, *one) for one in next_ones} == {1}
    # Those behind it move up one by one. A process that has been woken and gets no processor may
    # miss its place, so not all of them do.
    turns = [grants_until_in(writers, index, pid) for index, _, at_next in seen for pid in at_next]
    assert sum(turn <= 4 for turn in turns) >= 0.9 * len(turns), Counter(turns)
    assert set(writers) == {process.pid for process in processes}
