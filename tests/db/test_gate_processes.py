"""The gate across real processes and forks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from relay_queue.db.gate import gate_for
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


def saturate(database: str, number: int, started, results) -> None:
    """Write one-row transactions, one after the other, for as long as the others do."""
    import sqlite3

    gate = gate_for(database)
    plain = sqlite3.connect(database, isolation_level=None, timeout=20)
    plain.execute("PRAGMA synchronous=FULL")
    started.wait(30)
    until = time.monotonic() + 1.0
    written = 0
    while time.monotonic() < until:
        with gate.acquire(20):
            plain.execute("BEGIN IMMEDIATE")
            plain.execute("INSERT INTO t VALUES (?)", (number,))
            plain.execute("COMMIT")
        written += 1
    plain.close()
    results.put(written)


@pytest.mark.skipif(sys.platform != "linux", reason="measured on Linux only")
def test_saturated_processes_get_equal_shares_and_never_long_runs(database: Path) -> None:
    import sqlite3

    plain = sqlite3.connect(database)
    plain.execute("PRAGMA journal_mode=WAL")
    plain.execute("CREATE TABLE t (n INTEGER)")
    started, results = spawn.Barrier(4), spawn.Queue()
    processes = [
        spawn.Process(target=saturate, args=(str(database), number, started, results))
        for number in range(4)
    ]
    for process in processes:
        process.start()
    shares = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert min(shares) / max(shares) >= 0.85, shares
    # Equal sums can hide long runs: without the second file, over a thousand in a row.
    writers = [n for (n,) in plain.execute("SELECT n FROM t ORDER BY rowid")]
    plain.close()
    middle = writers[len(writers) // 4 : -len(writers) // 4]  # all four are running here
    changes = sum(a != b for a, b in pairwise(middle))
    assert changes / len(middle) >= 0.7
