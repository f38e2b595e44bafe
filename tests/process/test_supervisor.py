"""The supervisor with real processes and real signals, over workers that only pretend."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relay_queue.worker.supervisor import ONE_ORDER_SECONDS
from tests.conftest import ROOT, STOP_SECONDS, wait_until


class Supervised:
    """One supervisor process, its log of events and what it has said."""

    def __init__(self, directory: Path, child: str, **given: Any) -> None:
        self.log = directory / "events"
        self.said = directory / "output"
        arguments = json.dumps({"log": str(self.log), "child": child, **given})
        with self.said.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.process.fake_worker", arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def events(self, text: str = "") -> list[int]:
        """Return the process ids that logged a line beginning with ``text``, in order."""
        if not self.log.exists():
            return []
        lines = [line.split(" ", 1) for line in self.log.read_text().splitlines()]
        return [int(pid) for pid, event in lines if event.startswith(text)]

    def wait_for(self, text: str, count: int = 1) -> list[int]:
        """Wait until ``count`` events begin with ``text``; return who logged them."""
        wait_until(lambda: len(self.events(text)) >= count, message=self.story)
        return self.events(text)

    def wait_to_say(self, text: str) -> None:
        wait_until(lambda: text in self.output(), message=self.story)

    def output(self) -> str:
        return self.said.read_text()

    def end(self) -> int:
        """Wait for the supervisor's end by itself; return its exit code."""
        return self.process.wait(STOP_SECONDS)

    def signal_group(self, number: int) -> None:
        """Signal the supervisor and its workers at once, as a terminal does."""
        os.killpg(self.process.pid, number)

    def story(self) -> str:
        return (self.log.read_text() if self.log.exists() else "") + self.output()

    def close(self) -> None:
        """Kill what is left of the group."""
        for pid in {self.process.pid, *self.events()}:
            if belongs_to(pid, str(self.log)):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def belongs_to(pid: int, mark: str) -> bool:
    """Say whether a process lives and carries ``mark`` on its command line."""
    try:
        return mark in Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return False


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(child: str, **given: Any) -> Supervised:
        supervised = Supervised(tmp_path, child, **given)
        started.append(supervised)
        return supervised

    yield start
    for supervised in started:
        supervised.close()


def assert_nothing_left(supervised: Supervised) -> None:
    """Check that the supervisor reaped every worker it ever had."""
    left = [pid for pid in supervised.events() if belongs_to(pid, str(supervised.log))]
    assert not left, supervised.story()


def test_a_killed_worker_is_replaced_and_its_siblings_look(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("obey", processes=3)
    first = supervised.wait_for("ready", 3)
    os.kill(first[0], signal.SIGKILL)
    assert set(supervised.wait_for("order l", 2)) == set(first[1:])
    assert supervised.wait_for("ready", 4)[3] not in first
    assert not belongs_to(first[0], str(supervised.log)), "the dead worker was not reaped"


def test_a_single_worker_is_replaced_too(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise("obey")
    os.kill(supervised.wait_for("ready")[0], signal.SIGKILL)
    supervised.wait_for("ready", 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_signal_to_the_whole_group_is_one_polite_stop(
    supervise: Callable[..., Supervised], number: int
) -> None:
    supervised = supervise("obey", processes=2)
    workers = supervised.wait_for("ready", 2)
    supervised.signal_group(number)
    assert supervised.end() == 0
    assert sorted(supervised.events("order d")) == sorted(workers)
    assert not supervised.events("order q")
    assert_nothing_left(supervised)


def test_the_second_signal_tells_the_workers_to_quit(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("ignore", processes=2)
    supervised.wait_for("ready", 2)
    supervised.signal_group(signal.SIGTERM)
    supervised.wait_for("order d", 2)
    assert not supervised.events("order q")
    supervised.signal_group(signal.SIGTERM)
    assert supervised.end() == 0
    assert len(supervised.events("order q")) == 2
    assert_nothing_left(supervised)


def test_term_and_int_at_once_are_one_order_and_later_they_are_two(
    supervise: Callable[..., Supervised],
) -> None:
    """A terminal signals the group, and a process manager in it passes the order on."""
    supervised = supervise("ignore", processes=2)
    supervised.wait_for("ready", 2)
    # Both are there when it next looks, however long that takes.
    os.kill(supervised.process.pid, signal.SIGSTOP)
    supervised.signal_group(signal.SIGINT)
    supervised.signal_group(signal.SIGTERM)
    os.kill(supervised.process.pid, signal.SIGCONT)
    supervised.wait_for("order d", 2)
    time.sleep(ONE_ORDER_SECONDS + 0.2)
    assert not supervised.events("order q")
    supervised.signal_group(signal.SIGTERM)
    assert supervised.end() == 0
    assert len(supervised.events("order d")) == len(supervised.events("order q")) == 2


def test_a_hang_up_after_the_first_signal_is_not_the_second(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("ignore")
    supervised.wait_for("ready")
    supervised.signal_group(signal.SIGTERM)
    supervised.signal_group(signal.SIGHUP)
    supervised.wait_for("order d")
    os.kill(supervised.process.pid, signal.SIGTERM)
    supervised.wait_for("order q")
    assert supervised.end() == 0
    assert len(supervised.events("order d")) == 1


def test_no_worker_is_started_after_the_order_to_stop(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("ignore", processes=2)
    first, _ = supervised.wait_for("ready", 2)
    supervised.signal_group(signal.SIGTERM)
    supervised.wait_for("order d", 2)
    os.kill(first, signal.SIGKILL)
    supervised.wait_for("order l")
    os.kill(supervised.process.pid, signal.SIGTERM)
    assert supervised.end() == 1, "a worker that is killed while it stops did not end well"
    assert len(supervised.events("ready")) == 2


def test_a_worker_that_does_not_stop_in_time_is_told_to_quit(
    supervise: Callable[..., Supervised],
) -> None:
    # The supervisor adds a grace of 5 s to what the worker keeps by itself.
    supervised = supervise("ignore", shutdown_timeout=-4.9)
    supervised.wait_for("ready")
    os.kill(supervised.process.pid, signal.SIGTERM)
    assert supervised.end() == 0
    assert supervised.events("order q")


def test_a_worker_that_never_listens_is_killed_in_the_end(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("deaf", shutdown_timeout=-5)
    supervised.wait_for("ready")
    os.kill(supervised.process.pid, signal.SIGTERM)
    assert supervised.end() == 1
    assert "did not stop when it was told to" in supervised.output()
    assert_nothing_left(supervised)


def test_a_stopped_worker_is_not_dead(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise("obey", processes=2, ready_timeout=1)
    stopped, other = supervised.wait_for("ready", 2)
    os.kill(stopped, signal.SIGSTOP)
    os.kill(other, signal.SIGKILL)
    replacement = supervised.wait_for("ready", 3)[2]
    os.kill(replacement, signal.SIGKILL)
    supervised.wait_for("ready", 4)
    os.kill(stopped, signal.SIGCONT)
    assert supervised.wait_for("order l", 2) == [stopped, stopped]


def test_workers_learn_of_the_death_of_their_supervisor(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("obey", processes=3)
    workers = supervised.wait_for("ready", 3)
    supervised.process.kill()
    assert sorted(supervised.wait_for("order eof", 3)) == sorted(workers)


def test_a_worker_inherits_no_socket_of_its_supervisor_and_survives_signals(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("inspect_itself", processes=3)
    workers = supervised.wait_for("ready", 3)
    assert len(supervised.events("open [] handled True")) == 3, supervised.story()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(workers[0], number)
    os.kill(workers[1], signal.SIGKILL)
    assert workers[0] in supervised.wait_for("order l", 2)


def test_it_gives_up_on_a_worker_that_never_starts(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("crash")
    assert supervised.end() == 1
    assert len(supervised.events("crash")) == 5
    assert "failed to start 5 times in a row" in supervised.output()
    assert "this worker cannot start" in supervised.output()


def test_it_gives_up_when_the_system_has_no_room_for_a_process(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("obey", no_room=True)
    assert supervised.end() == 1
    assert "could not be started: no room for another process" in supervised.output()


def test_a_hang_up_that_was_ignored_stays_ignored(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise("ignore", nohup=True)
    supervised.wait_for("ready")
    supervised.signal_group(signal.SIGHUP)
    supervised.signal_group(signal.SIGTERM)
    supervised.wait_for("order d")
    wait_until(lambda: "Stopping" in supervised.output())  # a thread writes the lines
    supervised.signal_group(signal.SIGTERM)
    assert supervised.end() == 0


def test_giving_up_lets_the_other_workers_finish(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("first_crashes", processes=2)
    assert supervised.end() == 1
    assert len(supervised.events("ready")) == 1
    assert supervised.events("order d") == supervised.events("ready")
    assert_nothing_left(supervised)


def test_a_worker_that_hangs_at_its_start_is_killed_and_in_the_end_given_up(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("hang", ready_timeout=0.1)
    assert supervised.end() == 1
    assert "not ready within 0.1 s" in supervised.output()
    assert_nothing_left(supervised)


def test_time_in_which_the_database_does_not_answer_is_not_counted(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("wait_for_database", ready_timeout=0.2)
    worker = supervised.wait_for("waits")[0]
    wait_until(lambda: alive_seconds(worker) > 2)  # ten times as long as it may take
    Path(f"{supervised.log}.database").touch()
    assert supervised.wait_for("ready") == [worker]
    assert "not ready" not in supervised.output()


def test_a_worker_that_hangs_beside_a_database_that_answers_is_killed(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("hang_beside_database", ready_timeout=0.1)
    assert supervised.end() == 1
    assert "not ready within 0.1 s" in supervised.output()
    assert_nothing_left(supervised)


def test_draining_ends_when_all_workers_have_nothing_left(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("work_once", processes=3, drain=True)
    assert supervised.end() == 0
    assert len(supervised.events("worked")) == 3
    assert_nothing_left(supervised)


def test_a_worker_that_dies_while_draining_is_replaced_and_reported(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("crash_once", drain=True)
    assert supervised.end() == 1
    assert len(supervised.events("worked")) == 2
    assert "by SIGKILL" in supervised.output()


def test_a_worker_that_did_its_share_of_jobs_is_replaced_without_delay(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("work_once", max_jobs=1)
    supervised.wait_for("worked", 10)
    assert "starting another" not in supervised.output()
    os.kill(supervised.process.pid, signal.SIGTERM)
    assert supervised.end() == 0


def test_with_drain_a_worker_that_did_its_share_is_not_replaced(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("work_once", max_jobs=1, drain=True)
    assert supervised.end() == 0
    assert len(supervised.events("worked")) == 1


def test_workers_write_what_they_print_once_and_differ_in_random_numbers(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("work_once", processes=3, drain=True)
    assert supervised.end() == 0
    assert supervised.output().count("worked in fake-") == 3
    numbers = {line.split()[-1] for line in supervised.log.read_text().splitlines()[1:]}
    assert len(numbers) == 3


def test_orphans_of_workers_are_reaped_by_the_process_that_inherits_them(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("leave_orphan", adopts=True)
    orphan = supervised.wait_for("orphan of")[0]
    assert f"orphan of {supervised.process.pid}" in supervised.log.read_text()
    wait_until(lambda: not Path(f"/proc/{orphan}").exists())


def test_a_worker_that_keeps_the_writer_gate_is_killed(
    supervise: Callable[..., Supervised], tmp_path: Path
) -> None:
    database = str(tmp_path / "relay.sqlite3")
    supervised = supervise("hold_gate", gate=database, gate_hold=-4.9)
    supervised.wait_for("holds", 2)
    assert "it holds the database's writer gate: process" in supervised.output()


def test_an_idle_supervisor_sleeps(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    supervised = supervise("obey", gate=str(tmp_path / "relay.sqlite3"), gate_hold=10)
    worker = supervised.wait_for("ready")[0]
    switches = context_switches(supervised.process.pid)
    wait_until(lambda: alive_seconds(worker) > 3)
    more = context_switches(supervised.process.pid) - switches
    # One look at the gate a second, for as long as the test took to look itself, and some room.
    assert more < 10 + 3 * alive_seconds(worker)


def context_switches(pid: int) -> int:
    """Return how often a process went to sleep by itself."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise AssertionError("the system does not count context switches")


def alive_seconds(pid: int) -> float:
    """Return how long ago a process began."""
    began = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - began / os.sysconf("SC_CLK_TCK")
