"""Signals to a ``runworker`` that still imports the project."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.conftest import STOP_SECONDS, Project, wait_until

SLOW = """
import time
from tests.settings import *
open({began!r}, "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_while_the_project_is_imported_ends_the_process(
    project: Project, tmp_path: Path, number: signal.Signals
) -> None:
    began = tmp_path / "began"
    (tmp_path / "slow_settings.py").write_text(SLOW.format(began=str(began)))
    path = f"{tmp_path}:{project.environment['PYTHONPATH']}"
    process = project.spawn(
        "runworker", env={"DJANGO_SETTINGS_MODULE": "slow_settings", "PYTHONPATH": path}
    )
    wait_until(began.exists, message=lambda: project.log(process))
    # As process 1 of a container it would not even get a signal that it has no handler for.
    assert number in handled(process.pid)
    process.send_signal(number)
    assert process.wait(STOP_SECONDS) == 128 + number
    assert project.log(process) == ""


def handled(pid: int) -> set[int]:
    """Return the signals that a process has handlers for."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            mask = int(line.split()[1], 16)
            return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    raise AssertionError("the system does not say which signals are handled")
