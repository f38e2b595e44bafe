"""``relay demo`` as a process: what it shows, what it leaves behind, and that it can fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, processes_with, wait_until
from tests.process.terminal import COLUMNS, on_a_terminal, widest

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "manage.py", "relay", "demo"]
SECONDS = 200

# Python imports it at its start: jobs are then ranked as if they had no priority.
SABOTAGE = """
from relay_queue import ranking
honest = ranking.rank
ranking.rank = lambda available_at, priority, aging: honest(available_at, 0, aging)
"""


class Demo:
    """A demo in a temporary directory of its own, whose name has a space."""

    def __init__(self, directory: Path) -> None:
        self.temporary = directory / "with space"
        self.temporary.mkdir()
        self.project_database = directory / "project.sqlite3"
        self.log = directory / "demo.log"
        self.environment = {
            **os.environ,
            "CI": "true",
            "TMPDIR": str(self.temporary),
            "RELAY_TEST_DB": str(self.project_database),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*COMMAND, *arguments],
                cwd=ROOT,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text()

    def pids(self) -> dict[int, str]:
        """Return the processes of the demo, whoever their parent is by now."""
        return processes_with(f"TMPDIR={self.temporary}")

    def scratch(self) -> list[Path]:
        return list(self.temporary.iterdir())

    def wait_to_say(self, text: str) -> None:
        wait_until(lambda: text in self.output(), message=self.output)

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.pids(), message=lambda: str(self.pids()))
        assert self.scratch() == []
        assert not self.project_database.exists()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    for pid in demo.pids():
        os.kill(pid, signal.SIGKILL)


def test_demo_observes_what_it_promises_and_can_be_looked_at_afterwards(demo: Demo) -> None:
    process = demo.start("--keep")
    assert process.wait(SECONDS) == 0, demo.output()
    said = " ".join(re.sub(r"(?m)^\d\d:\d\d:\d\d +", "", demo.output()).split())
    for promise in (
        "each once",
        "urgent went first",
        "failed 3 times",
        "are dead letters after one attempt",
        "attempt 1 lost, effect unknown; attempt 2 acked",
        "with an ack: refused, the lease had ended: expired",
        "the job is cancelled at once",
        "QueueFull",
        "agrees with the ledger",
        "No fault in",
        "All of it was observed",
    ):
        assert promise in said
    story, _, kept = demo.output().partition("Kept in ")
    first, _, rest = story.partition("Once make serve has made the database")
    assert "make serve" in first.partition("What to try next")[2]
    assert all(verb in rest for verb in ("status", "doctor", "runworker")), "these need it"
    assert max(map(len, story.splitlines())) <= 80
    assert not demo.project_database.exists()
    assert demo.pids() == {}
    (folder,) = demo.scratch()
    assert kept.startswith(str(folder))
    command = kept.splitlines()[-1].strip()
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert "(all)" in done.stdout


def test_demo_fails_when_a_promise_is_broken(demo: Demo, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(SABOTAGE)
    process = demo.start(PYTHONPATH=f"{ROOT}{os.pathsep}{broken}")
    assert process.wait(SECONDS) == 1, demo.output()
    assert "NOT OBSERVED: in every queue urgent went first" in demo.output()
    demo.assert_nothing_left()


def test_ctrl_c_stops_everything_and_removes_the_folder(demo: Demo) -> None:
    process = demo.start()
    # The hardest moment: one of the workers is stopped and cannot hear.
    demo.wait_to_say("kill -STOP")
    # As a terminal does: to both processes of the demo.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, demo.output()
    assert "Interrupted" in demo.output()
    assert "Traceback" not in demo.output()
    demo.assert_nothing_left()


def test_term_stops_everything_too(demo: Demo) -> None:
    process = demo.start()
    demo.wait_to_say("processes with")
    process.terminate()
    assert process.wait(60) == 130, demo.output()
    assert "Traceback" not in demo.output()
    demo.assert_nothing_left()


def test_workers_stop_by_themselves_when_the_demo_is_killed(demo: Demo) -> None:
    process = demo.start()
    demo.wait_to_say("processes with")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not demo.pids(), message=lambda: str(demo.pids()))


@pytest.mark.thorough
def test_on_a_terminal_the_demo_draws_within_its_width(demo: Demo) -> None:
    code, text = on_a_terminal(COMMAND, demo.environment, SECONDS)
    assert code == 0, text
    assert "All of it was observed" in text
    assert widest(text) <= COLUMNS
    demo.assert_nothing_left()
