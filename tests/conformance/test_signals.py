"""The framework's signals and its context, while jobs run."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone

from relay_queue.backend import RelayBackend
from relay_queue.compat import TaskContext, TaskResultStatus, signals
from relay_queue.exceptions import Fatal
from relay_queue.testing import run_pending
from tests import tasks
from tests.conformance.conftest import Aliases

pytestmark = pytest.mark.django_db

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL


@pytest.mark.parametrize("task", [tasks.add, tasks.add_async], ids=["sync", "async"])
def test_a_job_that_succeeds_sends_three_signals(sent: list[Any], task: Any) -> None:
    result = task.enqueue(1, 2)
    assert [name for name, *_ in sent] == ["task_enqueued"]
    run_pending()
    assert [(name, status) for name, _, status, _ in sent] == [
        ("task_enqueued", READY),
        ("task_started", RUNNING),
        ("task_finished", SUCCESSFUL),
    ]
    assert {sender for _, sender, _, _ in sent} == {RelayBackend}
    assert {seen.id for *_, seen in sent} == {result.id}
    finished = sent[-1][3]
    assert finished.return_value == 3
    assert finished.attempts == 1
    assert finished.finished_at is not None


@pytest.mark.parametrize("task", [tasks.fail, tasks.fail_async], ids=["sync", "async"])
@pytest.mark.parametrize(("attempts", "status"), [(1, FAILED), (2, READY)])
def test_a_job_that_fails_tells_whether_it_is_over(
    sent: list[Any], task: Any, attempts: int, status: TaskResultStatus
) -> None:
    task.using(max_attempts=attempts).enqueue()
    run_pending()
    name, _, told, result = sent[-1]
    assert (name, told) == ("task_finished", status)
    assert [error.exception_class for error in result.errors] == [ValueError]
    assert result.is_finished is (status is FAILED)


def test_fatal_is_a_failure_at_the_first_attempt(sent: list[Any]) -> None:
    tasks.fatal.enqueue()
    run_pending()
    assert sent[-1][2] == FAILED
    assert sent[-1][3].errors[0].exception_class is Fatal


def test_enqueue_from_a_coroutine_sends_the_signal(sent: list[Any]) -> None:
    result = async_to_sync(tasks.add.aenqueue)(1)
    assert [(name, seen.id) for name, _, _, seen in sent] == [("task_enqueued", result.id)]


def test_sender_is_the_class_of_the_alias(sent: list[Any], settings: Any) -> None:
    path = f"{__name__}.{OtherBackend.__name__}"
    settings.TASKS = {"default": {"BACKEND": path}}
    tasks.add.enqueue(1)
    run_pending()
    assert {sender for _, sender, _, _ in sent} == {OtherBackend}


class OtherBackend(RelayBackend):
    """A project's own kind of Relay."""


def test_receivers_that_raise_change_nothing() -> None:
    def broken(**kwargs: Any) -> None:
        raise ValueError("in a receiver")

    every = (signals.task_enqueued, signals.task_started, signals.task_finished)
    for signal in every:
        signal.connect(broken)
    try:
        result = tasks.add.enqueue(1, 2)
        run_pending()
    finally:
        for signal in every:
            signal.disconnect(broken)
    result.refresh()
    assert result.return_value == 3


def test_the_frameworks_log_tells_of_each_step(
    caplog: pytest.LogCaptureFixture, framework: Any
) -> None:
    with caplog.at_level(logging.DEBUG, logger=framework.__name__):
        ok, bad = tasks.add.enqueue(1), tasks.fail_once_only.enqueue()
        run_pending()
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"id={ok.id}" in line and "enqueued" in line for line in lines)
    assert any(f"id={ok.id}" in line and "SUCCESSFUL" in line for line in lines)
    (failure,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"id={bad.id}" in failure.getMessage()
    assert failure.exc_info is not None


# --- The context ---------------------------------------------------------------------------


def test_function_with_context_gets_the_frameworks_context(aliases: Aliases) -> None:
    with aliases(default={}):
        result = tasks.describe_context.enqueue(3)
        run_pending()
        result.refresh()
    assert result.return_value == {
        "is_context": True,
        "attempt": 1,
        "id": result.id,
        "status": "RUNNING",
        "args": [3],
        "workers": 1,
    }


def test_attempt_of_the_context_counts_the_attempts() -> None:
    result = tasks.fail_with_attempt.using(max_attempts=2).enqueue()
    run_pending()
    run_pending(at=timezone.now() + timedelta(hours=1))
    result.refresh()
    assert [error.traceback.strip().splitlines()[-1] for error in result.errors] == [
        "ValueError: attempt 1",
        "ValueError: attempt 2",
    ]


def test_function_runs_with_a_context_of_the_framework_too() -> None:
    result = tasks.describe_context.enqueue(1)
    called = tasks.describe_context.func(TaskContext(task_result=result), 1)
    assert (called["attempt"], called["status"]) == (0, "READY")
