"""The gate by itself: order, time limits, and what is left behind."""

from __future__ import annotations

import _thread
import gc
import os
import re
import resource
import stat
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from relay_queue.db import gate as gate_module
from relay_queue.db import gatefile
from relay_queue.db.gate import Gate, GateTimeout, Permit, gate_for
from tests.conftest import wait_until
from tests.db.conftest import held_elsewhere, is_locked


@pytest.fixture
def gate(database: Path) -> Gate:
    return gate_for(database)


def queued(gate: Gate) -> int:
    return len(gate._first) + len(gate._rest)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_the_gate_is_a_lock_on_a_file_beside_the_database(gate: Gate, gate_path: Path) -> None:
    assert gate.path == str(gate_path)
    assert not is_locked(gate_path)
    with gate.acquire(1):
        assert is_locked(gate_path)
        assert gate.held_by_this_thread()
    assert not is_locked(gate_path)
    assert not gate.held_by_this_thread()


def test_after_its_files_were_deleted_the_gate_locks_those_that_others_open(
    gate: Gate, gate_path: Path
) -> None:
    with gate.acquire(1):
        gate.close_files()  # not while it is held: the lock would be gone
        assert is_locked(gate_path)
    gate.close_files()
    gate_path.unlink()
    with gate.acquire(1):
        assert is_locked(gate_path)


def test_there_is_one_gate_for_all_names_of_a_file(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "real.db").touch()
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    monkeypatch.chdir(tmp_path)
    gate = gate_for(tmp_path / "real.db")
    assert gate_for(str(tmp_path / "link.db")) is gate
    assert gate_for("real.db") is gate
    assert gate_for(str(tmp_path / "real.db")) is gate


def test_a_relative_name_means_another_file_after_chdir(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    first = gate_for("x.db")
    monkeypatch.chdir(tmp_path / "b")
    assert gate_for("x.db") is not first


def test_a_nested_permit_opens_nothing_until_the_last_is_released(
    gate: Gate, gate_path: Path
) -> None:
    outer = gate.acquire(1)
    inner = gate.acquire(0)
    inner.release()
    inner.release()
    assert is_locked(gate_path)
    second = gate.acquire(0)
    outer.release()
    assert is_locked(gate_path)
    second.release()
    assert not is_locked(gate_path)


def test_a_permit_can_be_released_from_another_thread(gate: Gate, gate_path: Path) -> None:
    permit = gate.acquire(1)
    in_thread(permit.release).join()
    assert not is_locked(gate_path)
    permit.release()
    with gate.acquire(0):
        assert is_locked(gate_path)


def test_another_thread_waits_and_the_wait_is_measured(gate: Gate) -> None:
    permit = gate.acquire(1)
    got: list[Permit] = []
    thread = in_thread(lambda: got.append(gate.acquire(10)))
    wait_until(lambda: queued(gate) == 1)
    assert not got
    permit.release()
    thread.join()
    assert permit.waited_seconds == 0
    assert got[0].waited_seconds > 0
    got[0].release()


def test_a_permit_that_is_lost_releases_itself(gate: Gate, gate_path: Path) -> None:
    permit = gate.acquire(1)
    del permit
    gc.collect()
    assert not is_locked(gate_path)


def test_the_permit_of_a_dead_thread_comes_back_with_its_last_reference(
    gate: Gate, gate_path: Path
) -> None:
    local = threading.local()

    def hold() -> None:
        local.permit = gate.acquire(1)

    in_thread(hold).join()
    gc.collect()
    with gate.acquire(1):
        assert is_locked(gate_path)


def test_a_permit_lost_while_the_gate_is_busy_with_itself_comes_back(
    gate: Gate, gate_path: Path
) -> None:
    permit = gate.acquire(1)
    with gate._mutex:  # as if the garbage collector had struck inside the gate
        del permit
        assert is_locked(gate_path)
    gate.acquire(5).release()
    assert not is_locked(gate_path)


def test_threads_are_served_in_order_of_arrival(gate: Gate) -> None:
    order: list[int] = []

    def enter(number: int) -> None:
        with gate.acquire(10):
            order.append(number)

    with gate.acquire(1):
        threads = []
        for number in range(5):
            threads.append(in_thread(lambda number=number: enter(number)))
            wait_until(lambda number=number: queued(gate) == number + 1)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_first_jumps_ahead_but_not_twice_in_a_row(gate: Gate) -> None:
    order: list[str] = []

    def enter(name: str, first: bool) -> None:
        with gate.acquire(10, first=first):
            order.append(name)

    with gate.acquire(1):
        threads = []
        names = [("a", False), ("b", False), ("loop", True), ("loop again", True)]
        for count, (name, first) in enumerate(names, start=1):
            threads.append(in_thread(lambda name=name, first=first: enter(name, first)))
            wait_until(lambda count=count: queued(gate) == count)
    for thread in threads:
        thread.join()
    assert order == ["loop", "a", "loop again", "b"]


def test_a_wait_ends_in_time_and_names_a_holder_of_another_process(
    gate: Gate, gate_path: Path
) -> None:
    since = time.time() - 34
    note = f"PID {since:.6f} import job 3"
    with held_elsewhere(gate_path, note) as other:
        with pytest.raises(GateTimeout) as raised:
            gate.acquire(0.05)
        holder = gate.holder()
        assert raised.value.holder == holder
        assert holder is not None
        assert (holder.pid, holder.thread) == (other.pid, "import job 3")
        assert raised.value.path == str(gate_path)
        assert raised.value.waited_seconds >= 0.05
        pattern = rf"process {other.pid} \(thread import job 3\), for ([\d.]+) s"
        told = re.search(pattern, str(raised.value))
        assert told, raised.value
        assert 33.9 < float(told[1]) < time.time() - since + 0.1
    # The request that was given up is served once more, and lets go at once.
    wait_until(lambda: gate.holder() is None)


def test_a_note_of_somebody_who_does_not_hold_the_gate_names_nobody(
    gate: Gate, gate_path: Path, monkeypatch
) -> None:
    """It stays from an earlier holder, or was forged: a name in an error may cost it its life."""
    with held_elsewhere(gate_path, f"{os.getpid()} {time.time():.6f} MainThread"):
        assert gate.holder() is None
        with pytest.raises(GateTimeout, match="left no name"):
            gate.acquire(0)
    with held_elsewhere(gate_path, f"PID {time.time():.6f} other"):
        assert gate.holder() is not None
        monkeypatch.setattr(gatefile, "LOCKS", "/nowhere/locks")
        assert gate.holder() is None


def test_a_wait_names_a_holder_of_this_process(gate: Gate) -> None:
    with gate.acquire(1):
        holders: list[object] = []

        def wait() -> None:
            try:
                gate.acquire(0.02)
            except GateTimeout as timeout:
                holders.append(timeout.holder)

        in_thread(wait).join()
        assert holders == [gate.holder()]
        assert gate.holder().pid == os.getpid()
        assert gate.holder().thread == "MainThread"


def test_the_note_in_the_file_names_the_holder_for_other_processes(gate: Gate) -> None:
    before = time.time()
    with gate.acquire(1):
        holder = gate._file.read_holder()
    assert holder is not None
    assert (holder.pid, holder.thread) == (os.getpid(), "MainThread")
    assert before - 1 <= holder.since <= time.time()
    assert gate.holder() is None


def test_a_damaged_note_names_nobody(gate: Gate, gate_path: Path) -> None:
    with held_elsewhere(gate_path, "not a note at all"):
        assert gate.holder() is None
        with pytest.raises(GateTimeout, match="left no name"):
            gate.acquire(0.01)


def test_a_long_thread_name_does_not_spoil_the_note(gate: Gate) -> None:
    def hold() -> None:
        with gate.acquire(1):
            notes.append(gate._file.read_holder())

    notes: list[object] = []
    thread = threading.Thread(target=hold, name="ü" * 500)
    thread.start()
    thread.join()
    gate.acquire(1).release()
    assert notes[0].pid == os.getpid()
    assert notes[0].thread.startswith("üü")


def test_a_zero_timeout_only_tries(gate: Gate, gate_path: Path) -> None:
    with held_elsewhere(gate_path):
        with pytest.raises(GateTimeout):
            gate.acquire(0)
        assert not gate._asked
    gate.acquire(0).release()


def test_a_free_gate_is_left_to_the_process_that_is_next(gate: Gate, gate_path: Path) -> None:
    """A waiter in another process needs a moment to wake up; nobody may overtake it then."""
    with held_elsewhere(f"{gate_path}-next"), gate.acquire(20) as permit:
        assert permit.waited_seconds >= gate_module.PATIENCE_SECONDS
    gate.acquire(20).release()


@pytest.mark.parametrize("timeout_seconds", [0, 0.05])
def test_time_is_never_up_at_a_free_gate(
    gate: Gate, gate_path: Path, timeout_seconds: float
) -> None:
    with held_elsewhere(f"{gate_path}-next"):
        for _ in range(3):
            with gate.acquire(timeout_seconds) as permit:
                assert is_locked(gate_path)
            assert permit.waited_seconds >= timeout_seconds
            assert not is_locked(gate_path)


def test_a_first_that_waits_in_slices_gets_past_a_line_that_waits_longer(
    gate: Gate, gate_path: Path
) -> None:
    served: list[int] = []

    def enter(number: int) -> None:
        with gate.acquire(20):
            served.append(number)

    def slice_succeeds() -> bool:
        try:
            gate.acquire(0.25, first=True).release()
        except GateTimeout:
            return False
        return True

    with held_elsewhere(f"{gate_path}-next"):
        threads = [in_thread(lambda number=number: enter(number)) for number in range(3)]
        wait_until(lambda: queued(gate) == 3 or served)
        for _ in range(3):
            wait_until(slice_succeeds)  # at times a slice is the turn of the others
        for thread in threads:
            thread.join()
    assert sorted(served) == [0, 1, 2]
    wait_until(lambda: not gate._asked)
    wait_until(lambda: not is_locked(gate_path))


def test_the_watchdog_sees_who_holds_the_gate_without_waiting_for_it(gate: Gate) -> None:
    assert gate.held_seconds() is None
    with gate.acquire(1), gate._mutex:
        ident, seconds = gate.held_seconds()
        assert ident == threading.get_ident()
        assert seconds >= 0
    assert gate.held_seconds() is None


def test_another_process_hands_over_at_its_death(gate: Gate, gate_path: Path) -> None:
    with held_elsewhere(gate_path) as process:
        got: list[Permit] = []
        thread = in_thread(lambda: got.append(gate.acquire(20)))
        wait_until(lambda: gate._asked)
        process.kill()
        thread.join()
    assert is_locked(gate_path)
    got[0].release()


def test_an_abandoned_request_is_let_go_when_it_is_met(gate: Gate, gate_path: Path) -> None:
    with held_elsewhere(gate_path):
        with pytest.raises(GateTimeout):
            gate.acquire(0.01)
        assert gate._asked
    wait_until(lambda: not gate._asked)
    wait_until(lambda: not is_locked(gate_path))


def test_an_abandoned_request_is_adopted_and_not_repeated(
    gate: Gate, gate_path: Path, monkeypatch
) -> None:
    requests = []
    lock = gate._file.lock
    monkeypatch.setattr(gate._file, "lock", lambda: (requests.append(1), lock()))
    with held_elsewhere(gate_path):
        for _ in range(5):
            with pytest.raises(GateTimeout):
                gate.acquire(0.01)
        thread = in_thread(lambda: gate.acquire(20).release())
        wait_until(lambda: queued(gate) == 1)
    thread.join()
    assert len(requests) == 1
    assert not is_locked(gate_path)


def test_a_request_met_late_opens_the_gate_for_nobody_while_it_is_held(
    gate: Gate, gate_path: Path, monkeypatch
) -> None:
    """Both would be granted: threads of a process share the lock."""
    go_on = threading.Event()
    lock = gate._file.lock
    monkeypatch.setattr(gate._file, "lock", lambda: (go_on.wait(60), lock()))
    with held_elsewhere(gate_path), pytest.raises(GateTimeout):
        gate.acquire(0.01)
    permit = gate.acquire(0.01)  # goes ahead of the helper
    got: list[Permit] = []
    thread = in_thread(lambda: got.append(gate.acquire(20)))
    wait_until(lambda: queued(gate) == 1)
    go_on.set()
    wait_until(lambda: not gate._asked)
    assert queued(gate) == 1
    assert is_locked(gate_path)
    permit.release()
    thread.join()
    assert is_locked(gate_path)
    got[0].release()
    assert not is_locked(gate_path)


def test_a_request_whose_lock_is_lost_again_is_repeated(
    gate: Gate, gate_path: Path, monkeypatch
) -> None:
    met, go_on = threading.Event(), threading.Event()
    lock = gate._file.lock
    monkeypatch.setattr(gate._file, "lock", lambda: (lock(), met.set(), go_on.wait(60)))
    with held_elsewhere(gate_path), pytest.raises(GateTimeout):
        gate.acquire(0.01)
    assert met.wait(60)
    gate.acquire(0.01).release()  # goes ahead of the helper, and takes the lock along
    with held_elsewhere(gate_path):
        got: list[Permit] = []
        thread = in_thread(lambda: got.append(gate.acquire(20)))
        wait_until(lambda: queued(gate) == 1)
        asked_at = gate._asked_at
        go_on.set()
        wait_until(lambda: gate._asked_at != asked_at)
        assert not got
    thread.join()
    assert is_locked(gate_path)
    got[0].release()
    assert not is_locked(gate_path)


@pytest.mark.parametrize("holder_lets_go", [False, True])
def test_ctrl_c_during_a_wait_leaks_nothing(
    gate: Gate, gate_path: Path, holder_lets_go: bool
) -> None:
    def interrupt(process) -> None:
        wait_until(lambda: gate._asked)
        if holder_lets_go:
            process.kill()
        _thread.interrupt_main()

    with held_elsewhere(gate_path) as process:
        thread = in_thread(lambda: interrupt(process))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            gate.acquire(20)
            time.sleep(20)  # the grant came first; the interrupt strikes here
        thread.join()
    gc.collect()
    assert queued(gate) == 0
    wait_until(lambda: not is_locked(gate_path))


def test_an_exception_while_the_lock_is_taken_leaks_nothing(
    gate: Gate, gate_path: Path, monkeypatch
) -> None:
    def strike(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate._file, "write_holder", strike)
        with pytest.raises(KeyboardInterrupt):
            gate.acquire(1)
    assert not is_locked(gate_path)
    with gate.acquire(1):
        assert is_locked(gate_path)


def test_the_files_have_the_mode_of_the_database_whatever_the_umask(
    gate: Gate, database: Path, gate_path: Path
) -> None:
    database.touch()
    database.chmod(0o660)
    previous = os.umask(0o077)
    try:
        gate.acquire(1).release()
    finally:
        os.umask(previous)
    for path in (gate_path, gate_path.with_name(gate_path.name + "-next")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_the_descriptors_close_on_exec_and_the_files_stay(gate: Gate, gate_path: Path) -> None:
    gate.acquire(1).release()
    for descriptor in (gate._file._gate, gate._file._next):
        assert not os.get_inheritable(descriptor)
    gate._file.close()
    assert gate_path.exists()


def test_a_file_that_cannot_be_opened_means_no_gate_and_one_warning(tmp_path: Path) -> None:
    gate = gate_for(tmp_path / "missing" / "x.db")
    with pytest.warns(RuntimeWarning, match="cannot be used") as caught:
        first = gate.acquire(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = in_thread(lambda: gate.acquire(0).release())
        second.join()
        first.release()
        with gate.acquire(0):
            assert gate.held_seconds() is None
    assert len(caught) == 1
    assert not gate.enabled


def test_a_gate_that_could_not_be_opened_is_tried_again_after_a_while(
    gate: Gate, gate_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(gate_module, "DISABLED_SECONDS", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # all of them are taken
    try:
        with pytest.warns(RuntimeWarning, match="Too many open files") as caught:
            ungated = gate.acquire(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(caught) == 1
    assert not gate.enabled
    with gate.acquire(1):
        assert gate.enabled
        assert is_locked(gate_path)
        ungated.release()  # it never was the gate's
        assert is_locked(gate_path)
    assert not is_locked(gate_path)


def test_a_broken_gate_is_left_alone_for_a_while(gate: Gate, monkeypatch) -> None:
    attempts: list[int] = []

    def fail() -> None:
        attempts.append(1)
        raise OSError("no locks available")

    monkeypatch.setattr(gate._file, "try_lock", fail)
    with pytest.warns(RuntimeWarning, match="no locks available"):
        gate.acquire(1).release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gate.acquire(1).release()
        gate.acquire(1).release()
    assert len(attempts) == 1


def test_locks_that_fail_for_a_waiter_let_the_whole_line_go_on(
    gate: Gate, gate_path: Path, monkeypatch
) -> None:
    def fail() -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(gate_module.warnings, "warn", lambda *args, **kwargs: None)
    with held_elsewhere(gate_path):
        threads = [in_thread(lambda: gate.acquire(20).release()) for _ in range(3)]
        wait_until(lambda: queued(gate) == 3)
        monkeypatch.setattr(gate._file, "try_lock_ahead", fail)
        for thread in threads:  # they look for themselves once their request is overdue
            thread.join()
    assert not gate.enabled
    wait_until(lambda: not gate._asked)
    wait_until(lambda: not is_locked(gate_path))


def test_waiters_go_on_when_locks_stop_working(gate: Gate, gate_path: Path, monkeypatch) -> None:
    def fail() -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(gate._file, "lock", fail)
    monkeypatch.setattr(gate_module.warnings, "warn", lambda *args, **kwargs: None)
    with held_elsewhere(gate_path), gate.acquire(20):
        assert not gate.enabled


def test_who_waits_is_served_although_the_system_gives_no_thread_for_the_helper(
    gate: Gate, gate_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "writer-gate":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with held_elsewhere(gate_path):
        with pytest.raises(GateTimeout):
            gate.acquire(0.05)
        waiting = in_thread(lambda: gate.acquire(60).release())
        wait_until(lambda: queued(gate) == 1)
    waiting.join(60)
    assert not waiting.is_alive()
    assert not is_locked(gate_path)
