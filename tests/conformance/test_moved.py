"""A task is moved or renamed while jobs of it wait: the next release runs them and reads the old."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tests
from relay_queue import enqueue_many
from relay_queue.compat import TaskResultMismatch, TaskResultStatus, task_backends
from relay_queue.exceptions import IdempotencyConflict
from relay_queue.models import Job
from relay_queue.task import resolve
from relay_queue.testing import run_pending
from relay_queue.worker import executor

Release = Callable[..., ModuleType]

REPORT = """
from relay_queue.task import task

@task(max_attempts=1)
def {name}(month):
    return f"report of {{month}}"
"""

OTHER = """
def report(month):
    return "no task"
"""


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


@pytest.fixture
def release(
    transactional_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Release]:
    """Return what installs a release: the text of each module of the app, by name."""
    monkeypatch.setattr(tests, "__path__", [*tests.__path__, str(tmp_path)])

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith("tests.shop_")]:
            del sys.modules[name]
        resolve.cache_clear()
        executor._plan.cache_clear()
        importlib.invalidate_caches()

    def install(**modules: str) -> ModuleType:
        forget()
        for path in tmp_path.glob("shop_*.py"):
            path.unlink()
        for name, text in modules.items():
            # Unlike the text before in length, which a cached module is told apart by.
            (tmp_path / f"{name}.py").write_text(f"{text}\n# {len(modules)} {name}\n")
        return importlib.import_module(f"tests.{next(iter(modules))}")

    yield install
    forget()


MOVES = [
    pytest.param(
        {
            "shop_new": REPORT.format(name="report"),
            "shop_old": "from tests.shop_new import report",
        },
        id="moved to another module",
    ),
    pytest.param({"shop_old": REPORT.format(name="monthly") + "\nreport = monthly"}, id="renamed"),
    pytest.param(
        {
            "shop_new": REPORT.format(name="monthly"),
            "shop_old": "from .shop_new import monthly as report",
        },
        id="moved and renamed",
    ),
]


@pytest.mark.parametrize("second", MOVES)
def test_waiting_jobs_run_and_old_results_are_read_under_the_old_path(
    release: Release, second: dict[str, str]
) -> None:
    first = release(shop_old=REPORT.format(name="report"))
    done = first.report.enqueue("May")
    assert run_pending() == 1
    waiting = first.report.enqueue("June")
    release(**second)
    old: Any = importlib.import_module("tests.shop_old")
    backend = task_backends["default"]
    assert backend.get_result(done.id).return_value == "report of May"
    assert run_pending() == 1
    result = backend.get_result(waiting.id)
    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, "report of June")
    assert result.task.func is old.report.func
    assert old.report.get_result(waiting.id).return_value == "report of June"
    assert set(Job.objects.values_list("task", flat=True)) == {"tests.shop_old.report"}


@pytest.mark.parametrize("second", MOVES)
def test_a_key_names_the_same_call_under_the_old_path_and_the_new(
    release: Release, second: dict[str, str]
) -> None:
    first = release(shop_old=REPORT.format(name="report"))
    waiting = first.report.using(idempotency_key="June").enqueue("June")
    release(**second)
    moved: Any = importlib.import_module("tests.shop_old").report
    assert moved.module_path != first.report.module_path
    assert moved.using(idempotency_key="June").enqueue("June").id == waiting.id
    (again,) = enqueue_many([moved.using(idempotency_key="June").bind("June")])
    assert again.id == waiting.id
    with pytest.raises(IdempotencyConflict):
        moved.using(idempotency_key="June").enqueue("July")


def test_a_key_of_another_task_is_a_conflict_although_its_path_leads_nowhere(
    release: Release,
) -> None:
    first = release(shop_old=REPORT.format(name="report"))
    first.report.using(idempotency_key="June").enqueue("June")
    second: Any = release(shop_new=REPORT.format(name="report"))
    with pytest.raises(IdempotencyConflict):
        second.report.using(idempotency_key="June").enqueue("June")


def test_a_job_whose_old_path_leads_to_another_function_does_not_run(release: Release) -> None:
    first = release(shop_old=REPORT.format(name="report"))
    waiting = first.report.enqueue("June")
    release(shop_old=OTHER)
    assert run_pending() == 1
    job = Job.objects.get(pk=waiting.id)
    assert (job.state, job.last_error.partition(":")[0]) == ("dead", "UnknownTask")
    with pytest.raises(TaskResultMismatch):
        task_backends["default"].get_result(waiting.id)
