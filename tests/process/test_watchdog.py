"""Who may be killed for holding the writer gate: only a process that does hold it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relay_queue.db.gate import Holder, gate_for
from relay_queue.worker import watchdog
from relay_queue.worker.watchdog import GateWatch
from tests.conftest import ROOT

HOLD = """
import sys
from relay_queue.db.gate import gate_for
with gate_for(sys.argv[1]).acquire(10):
    print("held", flush=True)
    sys.stdin.read()
"""


class Clock:
    """A monotonic clock that only a test moves."""

    now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def hold(database: Path) -> subprocess.Popen[str]:
    """Start a process that holds the gate until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(database)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_holder_is_overdue_after_the_limit_and_the_grace(clock: Clock, tmp_path: Path) -> None:
    database = tmp_path / "relay.sqlite3"
    watch = GateWatch(gate_for(database), 10)
    with hold(database) as holder:
        assert watch.overdue() is None
        clock.now += 15
        assert watch.overdue() is None
        clock.now += 0.1
        overdue = watch.overdue()
        holder.communicate("")
    assert overdue is not None
    assert overdue.pid == holder.pid
    assert watch.overdue() is None, "nobody holds the gate any more"


def test_another_stay_begins_anew(clock: Clock, tmp_path: Path) -> None:
    database = tmp_path / "relay.sqlite3"
    watch = GateWatch(gate_for(database), 10)
    for _ in range(2):
        with hold(database) as holder:
            assert watch.overdue() is None
            clock.now += 10
            assert watch.overdue() is None
            holder.communicate("")


def test_a_note_with_the_number_of_an_innocent_process_condemns_nobody(
    clock: Clock, tmp_path: Path
) -> None:
    if not Path("/proc/self/fdinfo").exists():
        pytest.skip("this system does not list the locks of a descriptor")
    database = tmp_path / "relay.sqlite3"
    gate = gate_for(database)

    class Misleading:
        """The gate, as a process in another container would leave its note."""

        path = gate.path

        def holder(self) -> Holder:
            return Holder(os.getpid(), "MainThread", 0.0)

    watch = GateWatch(Misleading(), 10)  # type: ignore[arg-type]
    with hold(database) as holder:
        assert watch.overdue() is None
        clock.now += 60
        assert watch.overdue() is None
        holder.communicate("")
    with gate.acquire(10):
        assert watch.overdue() is not None
