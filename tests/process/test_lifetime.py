"""The beginning and the end of worker processes, for what a project has beside its jobs."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from relay_queue.worker.watchdog import EXIT_HOGGED
from tests.conftest import STOP_SECONDS, wait_until
from tests.process import chores
from tests.process.farm import Farm, on_each_engine


def lines(farm: Farm, word: str) -> list[tuple[int, str]]:
    """Return process and text of what was reported, if it begins with a word."""
    path = Path(farm.file("reports"))
    found = path.read_text().splitlines() if path.exists() else []
    pairs = [line.split(" ", 1) for line in found]
    return [(int(pid), text) for pid, text in pairs if text.startswith(word)]


def drive(
    farm: Farm, preparation: str, *arguments: str, processes: int = 1
) -> subprocess.Popen[bytes]:
    return farm.drive(preparation, farm.file("reports"), *arguments, processes=processes)


def end(supervisor: subprocess.Popen[bytes]) -> int:
    supervisor.terminate()
    return supervisor.wait(STOP_SECONDS)


@on_each_engine
def test_what_a_thread_is_to_send_arrives_and_exit_handlers_run_in_each_process(
    farm: Farm,
) -> None:
    supervisor = drive(farm, "report", processes=2)
    workers = farm.workers()
    for _ in range(20):
        farm.enqueue(chores.complain, 5)
    farm.wait_finished()
    assert end(supervisor) == 0
    assert len(lines(farm, "line")) == 100
    assert sorted(pid for pid, _ in lines(farm, "exit")) == sorted([*workers, supervisor.pid])


def test_threads_that_take_log_lines_run_in_a_replacement_too(farm: Farm) -> None:
    supervisor = drive(farm, "report")
    (first,) = farm.workers()
    os.kill(first, signal.SIGKILL)
    job = farm.enqueue(chores.complain, 5)
    farm.wait_state(job, "succeeded")
    assert end(supervisor) == 0
    assert len(lines(farm, "line")) == 5
    assert first not in {pid for pid, _ in lines(farm, "")[-6:]}


def test_the_project_is_told_of_the_beginning_and_the_end_of_each_worker(farm: Farm) -> None:
    supervisor = drive(farm, "report", "--name=shop", processes=2)
    workers = farm.workers()
    job = farm.enqueue(chores.complain, 1)
    farm.wait_state(job, "succeeded")
    assert end(supervisor) == 0
    for name in ("shop-1", "shop-2"):
        ((pid, _),) = lines(farm, f"started {name}")
        assert pid in workers
        mine = [text for by, text in lines(farm, "") if by == pid and not text.startswith("line")]
        assert mine == [f"started {name}", f"stopping {name} 0", "exit"]


def test_an_exit_handler_that_does_not_end_keeps_no_process(farm: Farm) -> None:
    supervisor = drive(farm, "report_and_get_stuck")
    (worker,) = farm.workers()
    assert end(supervisor) == 0
    assert (worker, "exit") in lines(farm, "exit")


@pytest.mark.parametrize("finishes", [True, False])
def test_a_thread_of_a_function_is_waited_for_and_not_for_ever(farm: Farm, finishes: bool) -> None:
    supervisor = drive(farm, "report")
    (worker,) = farm.workers()
    job = farm.enqueue(chores.leave_thread, farm.file("go"))
    farm.wait_state(job, "succeeded")
    supervisor.terminate()
    wait_until(lambda: lines(farm, "stopping"), message=farm.everything)
    if finishes:
        farm.make("go")
    assert supervisor.wait(STOP_SECONDS) == 0
    assert bool(farm.runs(job, "ended")) is finishes
    assert (worker, "exit") in lines(farm, "exit")


def test_a_process_that_ends_to_free_the_writer_sends_its_reports_first(farm: Farm) -> None:
    farm.relay["GATE_HOLD_SECONDS"] = 2
    supervisor = drive(farm, "report_and_get_stuck", "--name=shop")
    (worker,) = farm.workers()
    job = farm.enqueue(chores.begin_by_hand_and_wait, farm.file("never"))
    assert farm.wait_state(job, "succeeded").attempt == 2
    mine = [text for pid, text in lines(farm, "") if pid == worker]
    assert mine == ["started shop", f"stopping shop {EXIT_HOGGED}", "exit"]
    assert end(supervisor) == 0


def test_a_worker_says_which_threads_the_fork_has_left_behind(farm: Farm) -> None:
    supervisor = drive(farm, "send_from_a_thread")
    assert end(supervisor) == 0
    said = farm.log(supervisor)
    assert "started before it was forked: sender of reports." in said
    assert "worker_process_started" in said


def test_the_end_of_a_worker_takes_no_folder_from_the_others(farm: Farm) -> None:
    supervisor = drive(farm, "keep_folder", "--max-jobs=1")
    (first,) = farm.workers()
    ((_, folder),) = lines(farm, "")
    job = farm.enqueue(chores.note)
    farm.wait_state(job, "succeeded")
    wait_until(lambda: farm.workers() and farm.workers() != [first], message=farm.everything)
    assert Path(folder).is_dir()
    assert end(supervisor) == 0
    assert not Path(folder).exists()
