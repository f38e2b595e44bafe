"""Tasks: their options, how they are checked, and which stored paths lead to one."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.test import override_settings
from django.utils.functional import SimpleLazyObject

from relay_queue.backoff import Backoff
from relay_queue.compat import InvalidTask, Task
from relay_queue.exceptions import ConfigurationError, InvalidJob, UnknownTask
from relay_queue.task import RelayTask, as_enqueued, resolve, task
from tests import tasks

IMMEDIATE = {
    "default": {"BACKEND": "relay_queue.backend.RelayBackend", "QUEUES": []},
    "other": {
        "BACKEND": f"{Task.__module__.removesuffix('.base')}.backends.immediate.ImmediateBackend",
        "QUEUES": [],
    },
}


def test_decorator_without_and_with_arguments_makes_relay_tasks() -> None:
    assert isinstance(tasks.noop, RelayTask)
    assert tasks.fail_once_only.max_attempts == 1
    assert tasks.create_group_atomically.atomic
    assert tasks.describe.takes_context


def test_the_frameworks_own_decorator_makes_relay_tasks_too() -> None:
    from relay_queue.compat import task as plain_task

    made: Any = plain_task(tasks.plain)
    assert isinstance(made, RelayTask)


def test_using_changes_a_copy_and_keeps_the_rest() -> None:
    changed = tasks.fail_once_only.using(
        idempotency_key="k", wait_seconds=2, timeout_seconds=3, lease_seconds=4, priority=5
    )
    assert (changed.idempotency_key, changed.wait_seconds, changed.max_attempts) == ("k", 2, 1)
    assert (changed.timeout_seconds, changed.lease_seconds, changed.priority) == (3, 4, 5)
    assert changed.using(max_attempts=9).max_attempts == 9
    assert tasks.fail_once_only.idempotency_key is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"max_attempts": 10**6}, "max_attempts"),
        ({"lease_seconds": 0.001}, "lease_seconds"),
        ({"timeout_seconds": -1}, "timeout_seconds"),
        ({"backoff": 3}, "use a Backoff"),
        ({"retry_on": ValueError}, "tuple of exception classes"),
        ({"fatal_on": ("ValueError",)}, "tuple of exception classes"),
        ({"priority": 101}, "priority"),
        ({"queue_name": "a,b"}, "comma"),
        ({"atomic": "no"}, "atomic of tests.tasks.plain is 'no'; use True or False"),
        ({"takes_context": 0}, "takes_context of tests.tasks.plain is 0; use True or False"),
        ({"atomic": True}, "timeout_seconds must be at most 2; it is None"),
        ({"atomic": True, "timeout_seconds": 30}, "timeout_seconds must be at most 2; it is 30"),
    ],
)
def test_unusable_options_are_refused_where_the_task_is_defined(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidTask, match=message):
        task(**options)(tasks.plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "high"}, "between -100 and 100, not 'high'"),
        ({"priority": float("nan")}, "between -100 and 100, not nan"),
        ({"queue_name": ["mail"]}, r"\['mail'\] is of type list"),
        ({"run_after": "tomorrow"}, "run_after must be a datetime, not 'tomorrow'"),
        ({"timeout_seconds": "5"}, "between 0.001 and 3.1536e.08, not '5'"),
        (
            {"queue_name": "typo"},
            r"^Queue 'typo' is not valid for backend\. .* 'default', 'mail'. Add it there",
        ),
    ],
)
def test_values_of_any_type_are_refused_with_what_they_may_be(
    options: dict[str, Any], message: str
) -> None:
    queues = {"default": {**IMMEDIATE["default"], "QUEUES": ["default", "mail"]}}
    with override_settings(TASKS=queues), pytest.raises(InvalidTask, match=message):
        tasks.noop.using(**options)


def test_refusal_is_chained_to_relays_own_error() -> None:
    with pytest.raises(InvalidTask) as refusal:
        task(max_attempts=0)(tasks.plain)
    assert isinstance(refusal.value.__cause__, InvalidJob)


@pytest.mark.parametrize("wait_seconds", [-1, "long", float("nan"), True])
def test_unusable_wait_is_refused(wait_seconds: Any) -> None:
    with pytest.raises(InvalidTask, match="wait_seconds"):
        tasks.noop.using(wait_seconds=wait_seconds)


def test_functions_that_no_worker_could_find_are_refused() -> None:
    class Holder:
        @staticmethod
        def method() -> None: ...

    Holder.method.__qualname__ = "Holder.method"
    with pytest.raises(InvalidTask, match="defined in a class"):
        task(Holder.method)
    with pytest.raises(InvalidTask, match="module level"):
        task(lambda: None)

    def script() -> None: ...

    script.__module__, script.__qualname__ = "__main__", "script"
    with pytest.raises(InvalidTask, match="where no worker would find it"):
        task(script)


def test_atomic_coroutine_functions_are_refused() -> None:
    with pytest.raises(InvalidTask, match="coroutine function"):
        task(atomic=True, timeout_seconds=1)(tasks.add_async.func)


def test_unknown_options_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="run_after"):
        task(run_after=None)  # type: ignore[call-overload]


def test_tasks_survive_pickling_and_copying() -> None:
    changed = tasks.retry_on_connection.using(
        idempotency_key="k", priority=3, queue_name="mail", max_attempts=4
    )
    for again in (pickle.loads(pickle.dumps(changed)), copy.deepcopy(changed)):
        assert again == changed
        assert again.func is changed.func


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionalTask(RelayTask[..., Any]):
    region: str = "north"


def test_a_subclass_survives_pickling_and_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RegionalTask(func=tasks.plain, region="south", max_attempts=4)
    monkeypatch.setattr(tasks, "plain", made)
    changed = made.using(priority=3)
    for again in (pickle.loads(pickle.dumps(changed)), copy.copy(changed), copy.deepcopy(changed)):
        assert type(again) is RegionalTask
        assert again == changed
        assert (again.region, again.priority, again.func) == ("south", 3, made.func)


def test_tasks_can_be_imported_while_the_settings_are_unusable_so_that_check_can_say_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with override_settings(RELAY={"CONCURENCY": 3}):
        made = task(max_attempts=5)(tasks.plain)
        monkeypatch.setattr(tasks, "plain", made)
        messages = [message.id for message in checks.run_checks()]
        assert "relay_queue.E001" in messages
        with pytest.raises(ConfigurationError, match="CONCURRENCY"):
            made.enqueue(1)
        with pytest.raises(InvalidTask, match="module level"):
            task(lambda: None)


def test_tasks_with_equal_options_are_equal_and_hashable() -> None:
    make = task(backoff=Backoff(1, 2), retry_on=(ValueError,))
    assert make(tasks.plain) == make(tasks.plain)
    assert hash(make(tasks.plain)) == hash(make(tasks.plain))


def test_our_decorator_serves_other_backends_without_the_options() -> None:
    with override_settings(TASKS=IMMEDIATE):
        made = task(backend="other", max_attempts=5)(tasks.plain)
        assert made.enqueue(3).return_value == 3


def test_idempotency_key_is_refused_where_the_backend_would_ignore_it() -> None:
    with override_settings(TASKS=IMMEDIATE):
        made = task(backend="other")(tasks.plain)
        with pytest.raises(InvalidTask, match=r"key 'k', and TASKS\['other'\] is a Immedi"):
            made.using(idempotency_key="k")
        with pytest.raises(InvalidTask, match="would run the call again"):
            tasks.noop.using(idempotency_key="k").using(backend="other")
        assert made.using(idempotency_key="k", backend="default").idempotency_key == "k"


# --- From a path to a task ---------------------------------------------------------------


def test_path_of_a_task_resolves_to_it() -> None:
    assert resolve("tests.tasks.add", "default") is tasks.add


def test_another_name_of_a_registered_task_resolves_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("tests.tasks.alias", "default") is tasks.add
    urgent = tasks.add.using(priority=9)
    monkeypatch.setattr(tasks, "urgent_add", urgent, raising=False)
    assert resolve("tests.tasks.urgent_add", "default") is urgent


@pytest.mark.parametrize(
    ("registered", "reason"),
    [
        (None, "'tests.tasks.add' is nothing, not a task"),
        (tasks.plain, "'tests.tasks.add' is a function, not a task"),
        (tasks.noop, "made of 'tests.tasks.add', where another one is"),
    ],
)
def test_another_name_of_a_task_that_is_not_registered_is_refused(
    monkeypatch: pytest.MonkeyPatch, registered: Any, reason: str
) -> None:
    monkeypatch.setattr(tasks, "kept", tasks.add, raising=False)
    monkeypatch.setattr(tasks, "add", registered)
    resolve.cache_clear()
    with pytest.raises(UnknownTask, match=reason):
        resolve("tests.tasks.kept", "default")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("os.system", "is a builtin_function_or_method, not a task"),
        ("tests.tasks.plain", "is a function, not a task"),
        ("tests.tasks.not_a_task", "is a function, not a task"),
        ("tests.tasks.calls", "is a list, not a task"),
        ("tests.tasks.missing", "is nothing, not a task"),
        ("tests.tasks.add.func", "names a module that is not there"),
        ("tests.no_such_module.add", "names a module that is not there"),
        ("antigravity.fly", "in no installed app"),
        ("add", "in no installed app"),
        ("", "in no installed app"),
        (".", "in no installed app"),
        ("tests..tasks", "names a module that is not there"),
        ("../../etc.passwd", "in no installed app"),
    ],
)
def test_other_paths_are_refused_with_the_reason(path: str, reason: str) -> None:
    with pytest.raises(UnknownTask, match=reason):
        resolve(path, "default")
    assert "antigravity" not in sys.modules


def test_looking_for_a_name_runs_no_code_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tasks, "__getattr__", asked.append, raising=False)
    with pytest.raises(UnknownTask):
        resolve("tests.tasks.conjured", "default")
    assert asked == []


def test_looking_for_a_name_makes_no_lazy_object(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    lazy = SimpleLazyObject(lambda: made.append("made"))
    monkeypatch.setattr(tasks, "lazy", lazy, raising=False)
    with pytest.raises(UnknownTask, match="is a SimpleLazyObject, not a task"):
        resolve("tests.tasks.lazy", "default")
    assert not made


def test_alias_must_be_backed_by_relay() -> None:
    with pytest.raises(UnknownTask, match="'nowhere'"):
        resolve("tests.tasks.add", "nowhere")
    with override_settings(TASKS=IMMEDIATE), pytest.raises(UnknownTask, match="does not back"):
        resolve("tests.tasks.add", "other")


def test_task_whose_own_alias_is_of_another_backend_runs_for_a_job_of_relays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with override_settings(TASKS=IMMEDIATE):
        foreign = Task(
            func=tasks.plain, backend="other", priority=0, queue_name="default", run_after=None
        )
        monkeypatch.setattr(tasks, "plain", foreign)
        assert resolve("tests.tasks.plain", "default") is foreign
        found = as_enqueued("tests.tasks.plain", "default", "mail", 3, idempotency_key="k")
        assert (found.backend, found.queue_name, found.priority) == ("default", "mail", 3)


def test_error_of_a_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rough.py").write_text("import no_such_dependency")
    monkeypatch.setattr("tests.__path__", [*sys.modules["tests"].__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        resolve("tests.rough.add", "default")


def test_stored_queue_and_priority_come_back_on_the_task() -> None:
    found = as_enqueued("tests.tasks.add", "default", "mail", 7)
    assert (found.queue_name, found.priority, found.func) == ("mail", 7, tasks.add.func)
    assert as_enqueued("tests.tasks.add", "default", "default", 0) is tasks.add


def test_queue_that_the_settings_no_longer_admit_still_resolves() -> None:
    only_mail = {"default": {**IMMEDIATE["default"], "QUEUES": ["default"]}}
    with override_settings(TASKS=only_mail):
        assert as_enqueued("tests.tasks.add", "default", "gone", 0) is tasks.add
