"""Scratch projects of ``relay demo``, ``drill`` and ``bench``: apart from any other project."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relay_queue.exceptions import UnknownTask
from relay_queue.lab import processes, tasks
from relay_queue.lab.project import variables
from relay_queue.task import RelayTask, resolve

FUNCTIONS = [
    name
    for name, function in inspect.getmembers(tasks, inspect.isfunction)
    if function.__module__ == tasks.__name__ and not name.startswith("_")
]

FILL = """
import django
django.setup()
from pathlib import Path
from relay_queue.lab.bench.workload import BenchProject, QUEUE, count
from relay_queue.states import State
project = BenchProject(Path.cwd())
project.migrate()
project.fill(ready=40, scheduled=20, finished=30)
with project.work() as workers:
    project.wait_finished(workers)
print(count(State.SUCCEEDED), count(State.SCHEDULED))
"""

LOAD = """
import django
django.setup()
from pathlib import Path
from relay_queue.lab import data
from relay_queue.lab.project import ScratchProject, counts
from relay_queue.models import Job, Lease
ScratchProject(Path.cwd()).migrate()
crowd = data.Crowd(finished=400, ready=30, dead=20, scheduled=10)
data.load(crowd)
print(counts(), Job.objects.count() == crowd.jobs, Lease.objects.values("outcome").distinct().count())
"""


def python(directory: Path, *arguments: str) -> str:
    """Run Python in a scratch project of its own, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**_without_project(), **variables("bench", directory)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _without_project() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("RELAY_")}


def test_no_function_of_the_lab_is_a_task_of_another_project() -> None:
    assert {"noop", "wait", "send_mail"} <= set(FUNCTIONS)
    for name in FUNCTIONS:
        with pytest.raises(UnknownTask, match="is a function, not a task"):
            resolve(f"{tasks.__name__}.{name}", "default")


def test_they_are_tasks_in_a_scratch_project(tmp_path: Path) -> None:
    script = (
        "import django; django.setup()\n"
        "from relay_queue.task import resolve\n"
        f"print(type(resolve('{tasks.__name__}.noop', 'default')).__name__)"
    )
    assert python(tmp_path, "-c", script).split() == [RelayTask.__name__]


def test_a_process_without_a_folder_has_no_database(tmp_path: Path) -> None:
    from relay_queue.lab import settings

    assert settings.DATABASES == {}


def test_filled_tables_have_no_fault_and_their_jobs_run(tmp_path: Path) -> None:
    assert python(tmp_path, "-c", FILL).split() == ["71", "20"], "30 that had run, and 41 more"
    report: dict[str, Any] = json.loads(
        python(tmp_path, "-m", "django", "relay", "verify", "--json")
    )
    assert report["faults"] == []


def test_a_crowd_has_every_state_and_its_counters(tmp_path: Path) -> None:
    said = python(tmp_path, "-c", LOAD)
    assert "'succeeded': 400" in said
    assert "'dead': 20" in said
    assert "'ready': 30, " in said
    assert "'scheduled': 10" in said
    assert said.split("}")[1].split() == ["True", "3"], "acked, failed and lost"


def test_a_wait_heeds_what_happens_meanwhile() -> None:
    def heed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.wait_for("the moon", lambda: None, seconds=60, heed=heed)
