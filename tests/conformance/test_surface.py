"""The framework offers what this suite knows, and no more: a new name must be covered first."""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest

from relay_queue.backend import RelayBackend
from relay_queue.compat import (
    BaseTaskBackend,
    Task,
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
)
from relay_queue.context import RelayContext
from relay_queue.task import RelayTask

PUBLIC: dict[type, set[str]] = {
    Task: {
        *("func", "priority", "backend", "queue_name", "run_after", "takes_context"),
        *("name", "module_path", "using", "get_backend"),
        *("enqueue", "aenqueue", "get_result", "aget_result", "call", "acall"),
    },
    TaskResult: {
        *("task", "id", "status", "enqueued_at", "started_at", "finished_at"),
        *("last_attempted_at", "args", "kwargs", "backend", "errors", "worker_ids"),
        *("return_value", "is_finished", "attempts", "refresh", "arefresh"),
    },
    TaskError: {"exception_class_path", "traceback", "exception_class"},
    TaskContext: {"task_result", "attempt"},
    BaseTaskBackend: {
        *("task_class", "validate_task", "check"),
        *("supports_defer", "supports_async_task", "supports_get_result", "supports_priority"),
        *("enqueue", "aenqueue", "get_result", "aget_result"),
    },
}


def public(kind: Any) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_this_suite_knows_every_public_name(kind: type) -> None:
    assert public(kind) == PUBLIC[kind]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(RelayTask, Task), (RelayBackend, BaseTaskBackend), (RelayContext, TaskContext)],
    ids=lambda kind: kind.__name__,
)
def test_our_classes_are_theirs_with_more(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs)
    assert all(hasattr(ours, name) for name in PUBLIC[theirs])


def test_fields_of_a_task_keep_their_defaults() -> None:
    defaults = {item.name: item.default for item in fields(RelayTask)}
    assert defaults["priority"] == 0
    assert defaults["backend"] == defaults["queue_name"] == "default"
    assert defaults["run_after"] is None
    assert defaults["takes_context"] is False


def test_there_are_the_four_statuses() -> None:
    assert set(TaskResultStatus.values) == {"READY", "RUNNING", "FAILED", "SUCCESSFUL"}


def test_the_module_offers_what_projects_import(framework: ModuleType) -> None:
    names = {"task", "task_backends", "default_task_backend", "TaskResult", "TaskContext"}
    assert names <= set(framework.__all__)
