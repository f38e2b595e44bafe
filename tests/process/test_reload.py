"""``--reload`` with real processes: a watched app, a reloader, and workers that only pretend."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, STOP_SECONDS, wait_until

RELOADER = """
import json, logging, sys
sys.path.insert(0, sys.argv[1])
import django
from django.conf import settings
settings.configure(INSTALLED_APPS=["watched_app"])
django.setup()
from relay_queue.worker.reload import CodeWatch, Reloader
logging.basicConfig(level="WARNING")
command = [sys.executable, "-m", "tests.process.fake_worker", sys.argv[2]]
sys.exit(Reloader(command, CodeWatch()).run())
"""


class Reloaded:
    """A reloader over one app in a scratch directory."""

    def __init__(self, directory: Path, child: str, given: dict[str, object]) -> None:
        self.app = directory / "watched_app"
        self.app.mkdir()
        for name in ("__init__.py", "tasks.py"):
            (self.app / name).write_text("")
        self.log = directory / "events"
        arguments = json.dumps({"log": str(self.log), "child": child, **given})
        self.process = subprocess.Popen(
            [sys.executable, "-c", RELOADER, str(directory), arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def events(self, text: str = "") -> list[int]:
        """Return who logged a line beginning with ``text``."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [int(line.split()[0]) for line in lines if line.split(" ", 1)[1].startswith(text)]

    def wait_for(self, text: str, count: int = 1) -> list[int]:
        wait_until(lambda: len(self.events(text)) >= count, message=lambda: self.log.read_text())
        return self.events(text)

    def change_code(self) -> None:
        """Give a file that nobody has imported another time of change."""
        path = self.app / "tasks.py"
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 10))

    def living(self) -> list[int]:
        """Return those of its processes that still run."""
        found = []
        for pid in set(self.events()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            except OSError:
                continue
            if str(self.log) in command:
                found.append(pid)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def reload(tmp_path: Path) -> Iterator[Callable[..., Reloaded]]:
    started: list[Reloaded] = []

    def start(child: str, **given: object) -> Reloaded:
        started.append(Reloaded(tmp_path, child, given))
        return started[-1]

    yield start
    for reloaded in started:
        reloaded.close()


def test_a_change_of_the_code_drains_the_workers_and_starts_new_ones(
    reload: Callable[..., Reloaded],
) -> None:
    reloaded = reload("obey")
    first = reloaded.wait_for("ready")
    reloaded.change_code()
    assert reloaded.wait_for("ready", 2)[1] not in first
    assert reloaded.events("order d") == first
    assert len(reloaded.events("supervisor")) == 2


def test_a_worker_that_is_slow_to_drain_is_hurried_for_the_new_code(
    reload: Callable[..., Reloaded],
) -> None:
    reloaded = reload("ignore")
    reloaded.wait_for("ready")
    reloaded.change_code()
    reloaded.wait_for("order d")
    reloaded.wait_for("order q")
    reloaded.wait_for("ready", 2)


@pytest.mark.parametrize("whole_group", [True, False])
def test_one_signal_is_one_polite_stop(reload: Callable[..., Reloaded], whole_group: bool) -> None:
    reloaded = reload("ignore")
    reloaded.wait_for("ready")
    for order in ("order d", "order q"):
        assert not reloaded.events("order q")
        if whole_group:
            os.killpg(reloaded.process.pid, signal.SIGINT)
        else:
            os.kill(reloaded.process.pid, signal.SIGTERM)
        reloaded.wait_for(order)
    assert reloaded.process.wait(STOP_SECONDS) == 0
    assert not reloaded.living()


def test_code_that_cannot_start_waits_for_a_change(reload: Callable[..., Reloaded]) -> None:
    reloaded = reload("crash")
    reloaded.wait_for("crash", 5)
    wait_until(lambda: not reloaded.living())
    assert reloaded.process.poll() is None
    reloaded.change_code()
    reloaded.wait_for("supervisor", 2)


def test_the_workers_drain_when_the_reloader_is_killed(reload: Callable[..., Reloaded]) -> None:
    reloaded = reload("obey")
    reloaded.wait_for("ready")
    reloaded.process.kill()
    reloaded.wait_for("order d")
    wait_until(lambda: not reloaded.living())


def test_the_end_of_a_drain_ends_the_reloader(reload: Callable[..., Reloaded]) -> None:
    reloaded = reload("work_once", drain=True)
    assert reloaded.process.wait(STOP_SECONDS) == 0
