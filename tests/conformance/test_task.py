"""The framework's ``Task`` and its decorator."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from datetime import datetime, timedelta
from types import ModuleType
from typing import Any

import django
import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone

from relay_queue.backend import RelayBackend
from relay_queue.compat import InvalidTask, InvalidTaskBackend, Task, TaskResultMismatch
from relay_queue.compat import task as plain_task
from relay_queue.models import Job
from relay_queue.task import RelayTask, task
from tests import tasks
from tests.conformance.conftest import Aliases

pytestmark = pytest.mark.django_db

DECORATORS = {"the framework's": plain_task, "ours": task}
ours_or_theirs = pytest.mark.parametrize("decorator", DECORATORS.values(), ids=DECORATORS.keys())


def with_context(context: Any, value: int) -> int:
    return value


@ours_or_theirs
def test_decorator_works_without_and_with_parentheses(decorator: Any) -> None:
    for made in (decorator(tasks.plain), decorator()(tasks.plain)):
        assert isinstance(made, RelayTask)
        assert (made.priority, made.queue_name, made.backend) == (0, "default", "default")
        assert (made.run_after, made.takes_context) == (None, False)
        assert made.func is tasks.plain
        assert made.name == "plain"
        assert made.module_path == "tests.tasks.plain"


@ours_or_theirs
def test_decorator_takes_the_frameworks_options(decorator: Any, aliases: Aliases) -> None:
    with aliases(default={}, other={}):
        made = decorator(priority=5, queue_name="mail", backend="other", takes_context=True)(
            with_context
        )
    assert (made.priority, made.queue_name, made.backend) == (5, "mail", "other")
    assert made.takes_context


@ours_or_theirs
def test_run_after_is_nothing_for_a_decorator(decorator: Any) -> None:
    with pytest.raises(TypeError):
        decorator(run_after=timezone.now())(tasks.plain)


@ours_or_theirs
def test_alias_that_is_not_configured_is_refused(decorator: Any) -> None:
    with pytest.raises(InvalidTaskBackend):
        decorator(backend="nowhere")(tasks.plain)


@pytest.mark.skipif(
    django.VERSION[:2] == (6, 0), reason="the decorator of Django 6.0 takes no further options"
)
def test_the_frameworks_decorator_takes_relays_options() -> None:
    made: Any = plain_task(max_attempts=7, timeout_seconds=8)(tasks.plain)  # type: ignore[call-overload]
    assert (made.max_attempts, made.timeout_seconds) == (7, 8)


def test_our_decorator_takes_relays_options_on_every_django() -> None:
    made = task(max_attempts=7, timeout_seconds=1, atomic=True, retry_on=(OSError,))(tasks.plain)
    assert (made.max_attempts, made.timeout_seconds, made.atomic) == (7, 1, True)


def test_task_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        tasks.add.priority = 3  # type: ignore[misc]


def test_using_makes_a_changed_copy() -> None:
    later = timezone.now() + timedelta(hours=1)
    changed = tasks.add.using(priority=5, queue_name="mail", run_after=later)
    assert (changed.priority, changed.queue_name, changed.run_after) == (5, "mail", later)
    assert changed.func is tasks.add.func
    assert (tasks.add.priority, tasks.add.queue_name, tasks.add.run_after) == (0, "default", None)


def test_using_nothing_keeps_everything() -> None:
    changed = tasks.add.using(priority=5)
    assert changed.using() == changed
    assert changed.using(priority=0).priority == 0


def test_using_another_alias_enqueues_through_it(aliases: Aliases) -> None:
    with aliases(default={}, other={}):
        result = tasks.add.using(backend="other").enqueue(1)
        assert (result.backend, result.task.backend) == ("other", "other")
        assert Job.objects.get(pk=result.id).backend == "other"
        with pytest.raises(InvalidTaskBackend):
            tasks.add.using(backend="nowhere")


def test_call_runs_the_function_here_and_now() -> None:
    assert tasks.add.call(1, right=2) == 3
    assert tasks.add_async.call(1, 2) == 3  # type: ignore[comparison-overlap]
    assert not Job.objects.exists()


def test_acall_runs_either_kind_of_function() -> None:
    async def both() -> list[Any]:
        return [await tasks.add.acall(1, 2), await tasks.add_async.acall(1, 2)]

    assert async_to_sync(both)() == [3, 3]
    assert not Job.objects.exists()


def test_backend_of_a_task_is_the_one_of_its_alias() -> None:
    backend = tasks.add.get_backend()
    assert isinstance(backend, RelayBackend)
    assert backend.alias == "default"


def test_get_result_and_aget_result_read_the_job() -> None:
    enqueued = tasks.add.enqueue(1, right=2)
    for found in (
        tasks.add.get_result(enqueued.id),
        async_to_sync(tasks.add.aget_result)(enqueued.id),
        tasks.add.using(priority=9).get_result(enqueued.id),
    ):
        assert (found.id, found.args, found.kwargs) == (enqueued.id, [1], {"right": 2})


def test_result_of_another_task_is_a_mismatch() -> None:
    enqueued = tasks.add.enqueue(1)
    with pytest.raises(TaskResultMismatch):
        tasks.noop.get_result(enqueued.id)
    with pytest.raises(TaskResultMismatch):
        async_to_sync(tasks.noop.aget_result)(enqueued.id)


# --- Validation --------------------------------------------------------------------------


@ours_or_theirs
def test_functions_must_be_at_the_top_of_a_module(decorator: Any) -> None:
    def inner() -> None: ...

    for function in (inner, lambda: None, len, print):
        with pytest.raises(InvalidTask):
            decorator(function)


@ours_or_theirs
def test_context_must_be_the_first_argument(decorator: Any) -> None:
    for function in (tasks.plain, tasks.noop.func):
        with pytest.raises(InvalidTask, match="context"):
            decorator(takes_context=True)(function)


@pytest.mark.parametrize("priority", [101, -101, 1.5])
def test_priority_is_a_whole_number_within_bounds(priority: Any) -> None:
    with pytest.raises(InvalidTask, match="priority"):
        plain_task(priority=priority)(tasks.plain)
    with pytest.raises(InvalidTask, match="priority"):
        tasks.add.using(priority=priority)


@pytest.mark.parametrize("priority", [100, -100, 0])
def test_the_whole_range_of_priorities_is_stored(priority: int) -> None:
    result = tasks.add.using(priority=priority).enqueue(1)
    assert Job.objects.get(pk=result.id).priority == priority


def test_run_after_must_be_aware() -> None:
    with pytest.raises(InvalidTask, match="aware"):
        tasks.add.using(run_after=datetime(2030, 1, 1))


def test_queue_must_be_admitted_by_the_alias(aliases: Aliases) -> None:
    with aliases(default={"QUEUES": ["default", "mail"]}):
        assert tasks.add.using(queue_name="mail").queue_name == "mail"
        with pytest.raises(InvalidTask, match="typo"):
            tasks.add.using(queue_name="typo")


def test_queue_is_looked_at_again_when_the_task_is_enqueued(aliases: Aliases) -> None:
    mail = tasks.add.using(queue_name="mail")
    with aliases(default={"QUEUES": ["default"]}):
        with pytest.raises(InvalidTask, match="mail"):
            mail.enqueue(1)
        with pytest.raises(InvalidTask, match="mail"):
            async_to_sync(mail.aenqueue)(1)
    assert not Job.objects.exists()


def test_the_default_queue_is_the_only_one_unless_said(
    settings: Any, framework: ModuleType
) -> None:
    settings.TASKS = {"default": {"BACKEND": "relay_queue.backend.RelayBackend"}}
    assert framework.task_backends["default"].queues == {"default"}
    with pytest.raises(InvalidTask):
        tasks.add.using(queue_name="mail")


# --- Copies ------------------------------------------------------------------------------


def test_tasks_are_picklable_and_copyable() -> None:
    later = timezone.now() + timedelta(hours=1)
    changed = tasks.retry_on_connection.using(priority=3, queue_name="mail", run_after=later)
    for again in (pickle.loads(pickle.dumps(changed)), copy.deepcopy(changed)):
        assert again == changed
        assert again.func is changed.func
        assert isinstance(again, Task)


def test_pickle_of_what_is_no_task_any_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(tasks.add)
    monkeypatch.setattr(tasks, "add", tasks.plain)
    with pytest.raises(ValueError, match="not a task"):
        pickle.loads(pickled)
    monkeypatch.delattr(tasks, "add")
    with pytest.raises(ValueError, match="not a task any more"):
        pickle.loads(pickled)
