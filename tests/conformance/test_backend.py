"""The framework's backend class, and the handler that makes one for each alias."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection
from django.test.utils import CaptureQueriesContext

from relay_queue import enqueue_many
from relay_queue.backend import RelayBackend
from relay_queue.backoff import Backoff
from relay_queue.compat import InvalidTask, InvalidTaskBackend, TaskResultDoesNotExist
from relay_queue.compat import task as frameworks_task
from relay_queue.exceptions import InvalidJob, PayloadError
from relay_queue.models import Job
from relay_queue.task import RelayTask, task
from relay_queue.testing import run_pending
from tests import tasks
from tests.conformance.conftest import Aliases

pytestmark = pytest.mark.django_db


def test_backend_has_its_alias_its_queues_and_its_options(
    aliases: Aliases, framework: ModuleType
) -> None:
    with aliases(default={"QUEUES": ["a", "b"], "OPTIONS": {"max_attempts": 5}}):
        backend = framework.task_backends["default"]
        assert isinstance(backend, RelayBackend)
        assert (backend.alias, backend.queues) == ("default", {"a", "b"})
        assert backend.options == {"max_attempts": 5}
        assert backend.task_class is RelayTask


def test_everything_that_can_be_supported_is(framework: ModuleType) -> None:
    backend = framework.default_task_backend
    assert backend.supports_defer
    assert backend.supports_async_task
    assert backend.supports_get_result
    assert backend.supports_priority


def test_default_backend_is_a_way_to_the_alias_default(framework: ModuleType) -> None:
    result = framework.default_task_backend.enqueue(tasks.add, [1], {"right": 2})
    assert framework.default_task_backend.get_result(result.id).args == [1]


def test_arguments_may_be_named(framework: ModuleType) -> None:
    backend = framework.task_backends["default"]
    result = backend.enqueue(task=tasks.add, args=(1,), kwargs={"right": 2})
    assert backend.get_result(result_id=result.id).kwargs == {"right": 2}


def test_async_twins_do_the_same(framework: ModuleType) -> None:
    backend = framework.task_backends["default"]

    async def both() -> Any:
        result = await backend.aenqueue(tasks.add, (1,), {"right": 2})
        return await backend.aget_result(result.id)

    assert async_to_sync(both)().kwargs == {"right": 2}


def test_missing_result_does_not_exist(framework: ModuleType) -> None:
    backend = framework.task_backends["default"]
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result("no such id")
    with pytest.raises(TaskResultDoesNotExist):
        async_to_sync(backend.aget_result)("123456789")


def test_validate_task_is_asked_for_each_new_task(framework: ModuleType) -> None:
    backend = framework.task_backends["default"]
    assert backend.validate_task(tasks.add) is None
    with pytest.raises(InvalidTask):
        task(max_attempts=-1)(tasks.plain)


def test_several_aliases_serve_one_project(aliases: Aliases, framework: ModuleType) -> None:
    with aliases(default={}, slow={"QUEUES": ["big"], "OPTIONS": {"max_attempts": 9}}):
        slow = tasks.add.using(backend="slow", queue_name="big")
        results = [tasks.add.enqueue(1), slow.enqueue(2)]
        jobs = [Job.objects.get(pk=result.id) for result in results]
        assert [(job.backend, job.max_attempts) for job in jobs] == [("default", 3), ("slow", 9)]
        assert run_pending() == 2
        for result, alias in zip(results, ["default", "slow"], strict=True):
            found = framework.task_backends[alias].get_result(result.id)
            assert (found.backend, found.task.backend) == (alias, alias)
        with pytest.raises(InvalidTask):
            slow.using(queue_name="default")


def test_relay_stands_beside_other_backends(settings: Any, framework: ModuleType) -> None:
    immediate = f"{framework.__name__}.backends.immediate.ImmediateBackend"
    settings.TASKS = {
        "default": {"BACKEND": "relay_queue.backend.RelayBackend"},
        "now": {"BACKEND": immediate},
    }
    assert framework.task_backends["now"].enqueue(tasks.add, (1, 2), {}).return_value == 3
    assert not Job.objects.exists()


@pytest.mark.parametrize("decorator", [frameworks_task, task])
def test_task_of_another_alias_can_be_sent_to_relay(
    decorator: Any, settings: Any, framework: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.TASKS = {
        "default": {"BACKEND": f"{framework.__name__}.backends.immediate.ImmediateBackend"},
        "relay": {"BACKEND": "relay_queue.backend.RelayBackend"},
    }
    made = decorator(tasks.plain)
    monkeypatch.setattr(tasks, "plain", made)
    result = made.using(backend="relay").enqueue(4)
    assert run_pending() == 1
    result.refresh()
    assert result.return_value == 4
    assert made.using(backend="relay").get_result(result.id).return_value == 4


@pytest.mark.django_db(transaction=True)
def test_each_thread_enqueues_with_a_backend_and_a_connection_of_its_own(
    framework: ModuleType,
) -> None:
    """Eight threads at once: nothing is lost, nothing doubled, every result is readable."""
    results: dict[int, list[Any]] = {}
    backends: dict[int, Any] = {}
    start = threading.Barrier(8)

    def produce(number: int) -> None:
        try:
            start.wait(60)
            backends[number] = framework.task_backends["default"]
            results[number] = [tasks.add.enqueue(number, right=n) for n in range(20)]
            results[number] += async_to_sync(_enqueue_some)(number)
        finally:
            connection.close()

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({id(backend) for backend in backends.values()}) == 8
    ids = {result.id for some in results.values() for result in some}
    assert len(ids) == Job.objects.count() == 8 * 25
    assert run_pending() == 200
    for number, some in results.items():
        for result in some:
            result.refresh()
            assert result.return_value == number + result.kwargs["right"]


async def _enqueue_some(number: int) -> list[Any]:
    return [await tasks.add.aenqueue(number, right=n) for n in range(5)]


def test_ten_thousand_calls_of_two_tasks_take_one_transaction_and_few_statements(
    framework: ModuleType,
) -> None:
    calls = [(tasks.add.bind(n), tasks.echo.bind(n))[n % 2] for n in range(10_000)]
    with CaptureQueriesContext(connection) as queries:
        results = framework.default_task_backend.enqueue_many(calls)
    assert len(queries) < 12
    assert len(set(results.ids)) == Job.objects.count() == 10_000
    assert (results[9_999].args, results[9_998].task.name) == ([9_999], "add")


# --- Options of the alias and checks --------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"lease_seconds": 0.001}, "lease_seconds"),
        ({"timeout_seconds": "long"}, "timeout_seconds"),
        ({"backoff": 3}, "backoff"),
        ({"max_payload_bytes": 10**12}, "max_payload_bytes"),
        ({"max_payload_bytes": True}, "max_payload_bytes"),
        ({"enqueue_on_commit": "nowhere"}, "enqueue_on_commit"),
        ({"enqueue_on_commit": 3}, "enqueue_on_commit"),
        ({"attempts": 5}, "it has attempts; RelayBackend knows backoff, "),
        ({5: "attempts"}, "it has 5; RelayBackend knows backoff, "),
    ],
)
def test_check_names_the_option_that_no_task_could_use(
    aliases: Aliases, framework: ModuleType, options: dict[str, Any], word: str
) -> None:
    with aliases(default={}, odd={"OPTIONS": options}):
        (found,) = framework.task_backends["odd"].check()
        assert found.id == "relay_queue.E006"
        assert "'odd'" in found.msg
        assert word in found.msg
        # A module that defines tasks loads all the same, or `check` could not say so.
        task = tasks.echo.using(backend="odd")
        for refused in (lambda: task.enqueue("x"), lambda: enqueue_many([task.bind("x")])):
            with pytest.raises(InvalidJob, match=r"'odd'.*is not usable"):
                refused()
        assert not Job.objects.exists()


def test_check_has_nothing_to_say_of_good_options(aliases: Aliases, framework: ModuleType) -> None:
    good = {
        "max_attempts": 5,
        "backoff": Backoff(1, 2),
        "timeout_seconds": 5,
        "lease_seconds": 30,
        "max_payload_bytes": 4096,
        "enqueue_on_commit": True,
    }
    with aliases(default={"OPTIONS": good}):
        assert framework.task_backends["default"].check() == []


def test_check_leaves_broken_settings_to_their_own_check(
    settings: Any, framework: ModuleType
) -> None:
    settings.RELAY = {"MAX_ATTEMPTS": "many"}
    assert framework.task_backends["default"].check() == []


def test_manage_check_asks_every_backend(aliases: Aliases) -> None:
    with aliases(default={"OPTIONS": {"max_attempts": 0}}):
        found = [message.id for message in checks.run_checks()]
        assert "relay_queue.E006" in found
        with pytest.raises(SystemCheckError, match=r"E006"):
            call_command("check")


@pytest.mark.parametrize(
    "parameters",
    [
        {"OPTIONS": None},
        {"OPTIONS": ["attempts"]},
        {"QUEUES": "default"},
        {"QUEUES": None},
        {"QUEUES": [["default"]]},
    ],
)
def test_parameters_that_make_no_sense_are_an_invalid_backend(
    aliases: Aliases, framework: ModuleType, parameters: dict[str, Any]
) -> None:
    with aliases(odd=parameters), pytest.raises(InvalidTaskBackend, match="'odd'"):
        framework.task_backends["odd"]


class RegionalBackend(RelayBackend):
    known_options = (*RelayBackend.known_options, "region")


def test_a_subclass_has_options_of_its_own_beside_relays(settings: Any) -> None:
    path = f"{__name__}.RegionalBackend"
    settings.TASKS = {
        "default": {"BACKEND": path, "OPTIONS": {"region": "south", "max_attempts": 5}},
        "wrong": {"BACKEND": path, "OPTIONS": {"reigon": "south"}},
    }
    backend = tasks.noop.get_backend()
    assert backend.options["region"] == "south"
    assert backend.check() == []
    assert Job.objects.get(pk=tasks.noop.enqueue().id).max_attempts == 5
    with pytest.raises(InvalidJob, match=r"has reigon; RegionalBackend knows .*region"):
        tasks.noop.using(backend="wrong").enqueue()


def test_payload_limit_of_a_task_or_an_alias_is_kept(aliases: Aliases) -> None:
    with aliases(default={"OPTIONS": {"max_payload_bytes": 40}}):
        tasks.echo.enqueue("x" * 10)
        with pytest.raises(PayloadError, match="max_payload_bytes is 40"):
            tasks.echo.enqueue("x" * 20)
        with pytest.raises(PayloadError):
            tasks.echo.get_backend().enqueue_many([tasks.echo.bind("x" * 20)])  # type: ignore[attr-defined]
    small = task(max_payload_bytes=30)(tasks.echo.func)
    assert small.max_payload_bytes == 30
    for limit in (10, 2**30, 1.5):
        with pytest.raises(InvalidTask, match="max_payload_bytes"):
            task(max_payload_bytes=limit)(tasks.plain)  # type: ignore[call-overload]
    assert Job.objects.count() == 1
