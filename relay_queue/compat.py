"""Django's task framework, wherever it lives.

Django has it from 6.0 on; on 5.2 the package ``django-tasks`` backports it with a few other names.
This is the only module that knows the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from django.core.exceptions import ImproperlyConfigured

try:
    try:
        from django.tasks import signals, task_backends
        from django.tasks.backends.base import BaseTaskBackend
        from django.tasks.base import (
            DEFAULT_TASK_BACKEND_ALIAS,
            DEFAULT_TASK_PRIORITY,
            DEFAULT_TASK_QUEUE_NAME,
            Task,
            TaskContext,
            TaskError,
            TaskResult,
            TaskResultStatus,
            task,
        )
        from django.tasks.exceptions import (
            InvalidTask,
            InvalidTaskBackend,
            TaskResultDoesNotExist,
            TaskResultMismatch,
        )
        from django.utils.json import normalize_json
    except ModuleNotFoundError as missing:
        if missing.name != "django.tasks":
            raise
        from django_tasks import signals, task_backends  # type: ignore[no-redef]
        from django_tasks.backends.base import BaseTaskBackend  # type: ignore[no-redef]
        from django_tasks.base import (  # type: ignore[no-redef]
            DEFAULT_TASK_BACKEND_ALIAS,
            DEFAULT_TASK_PRIORITY,
            DEFAULT_TASK_QUEUE_NAME,
            Task,
            TaskContext,
            TaskError,
            TaskResult,
            TaskResultStatus,
            task,
        )
        from django_tasks.exceptions import InvalidTaskBackendError as InvalidTaskBackend  # type: ignore[no-redef]
        from django_tasks.exceptions import InvalidTaskError as InvalidTask  # type: ignore[no-redef]
        from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch  # type: ignore[no-redef]
        from django_tasks.utils import normalize_json  # type: ignore[no-redef]
except ModuleNotFoundError as missing:
    if missing.name != "django_tasks":
        raise
    raise ImproperlyConfigured(
        "Relay needs Django's task framework. Django 6.0 and later have it; with Django 5.2 "
        "install the package django-tasks (pip install 'django-relay-queue[backport]')."
    ) from missing

if TYPE_CHECKING:
    AnyTask: TypeAlias = Task[..., Any]
    AnyResult: TypeAlias = TaskResult[..., Any]
else:  # the framework's classes are generic to the type checker only
    AnyTask = Task
    AnyResult = TaskResult

__all__ = [
    "DEFAULT_TASK_BACKEND_ALIAS",
    "DEFAULT_TASK_PRIORITY",
    "DEFAULT_TASK_QUEUE_NAME",
    "AnyResult",
    "AnyTask",
    "BaseTaskBackend",
    "InvalidTask",
    "InvalidTaskBackend",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultMismatch",
    "TaskResultStatus",
    "normalize_json",
    "signals",
    "task",
    "task_backends",
]
