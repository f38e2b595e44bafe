"""The front door: enqueue, results, and the promises made to callers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from relay_queue import store
from relay_queue.backend import MOST_REMEMBERED, RelayBackend
from relay_queue.backoff import Backoff
from relay_queue.compat import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    signals,
    task_backends,
)
from relay_queue.exceptions import (
    Cancelled,
    IdempotencyConflict,
    InvalidJob,
    PayloadError,
    QueueFull,
    TimedOut,
    UnknownTask,
)
from relay_queue.models import Job, Worker
from relay_queue.store.records import Settlement
from relay_queue.task import task
from relay_queue.testing import run_pending
from tests import tasks

pytestmark = pytest.mark.django_db

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def backend() -> RelayBackend:
    found = task_backends["default"]
    assert isinstance(found, RelayBackend)
    return found


@pytest.fixture
def enqueued_signals() -> Iterator[list[tuple[type, str]]]:
    sent: list[tuple[type, str]] = []

    def receive(sender: type, task_result: Any, **kwargs: Any) -> None:
        sent.append((sender, task_result.id))

    signals.task_enqueued.connect(receive)
    yield sent
    signals.task_enqueued.disconnect(receive)


def relay(**params: Any) -> Any:
    settings = {"BACKEND": "relay_queue.backend.RelayBackend", "QUEUES": [], **params}
    return override_settings(TASKS={"default": settings})


def claim_one(worker_id: int | None = None) -> Any:
    with store.transaction() as tx:
        (claim,) = store.claim(tx, worker_id=worker_id, queues=["default"], limit=1)
    return claim


def settle(claim: Any, verb: Any = "nack", **values: Any) -> None:
    with store.transaction() as tx:
        (settled,) = store.settle(tx, [Settlement(verb, claim.lease_id, claim.token, **values)])
    assert settled.accepted


# --- Enqueue -------------------------------------------------------------------------------


def test_enqueue_stores_a_job_and_returns_its_result() -> None:
    result = tasks.add.using(priority=5, queue_name="mail").enqueue(1, right=2)
    job = Job.objects.get(pk=int(result.id))
    assert (job.task, job.queue, job.priority, job.backend) == (
        "tests.tasks.add",
        "mail",
        5,
        "default",
    )
    assert result.status == TaskResultStatus.READY
    assert (result.args, result.kwargs, result.backend) == ([1], {"right": 2}, "default")
    assert result.enqueued_at == job.created_at
    assert (result.attempts, result.errors, result.finished_at) == (0, [], None)


def test_all_features_of_the_framework_are_supported(backend: RelayBackend) -> None:
    assert backend.supports_defer
    assert backend.supports_async_task
    assert backend.supports_get_result
    assert backend.supports_priority


def test_options_of_the_task_reach_the_job() -> None:
    options = tasks.noop.using(
        max_attempts=7, timeout_seconds=8, lease_seconds=9, idempotency_key="k"
    )
    job = Job.objects.get(pk=options.enqueue().id)
    assert (job.max_attempts, job.timeout_seconds, job.lease_seconds) == (7, 8, 9)
    assert job.idempotency_key == "k"


def test_options_of_the_alias_are_defaults_that_tasks_override() -> None:
    backoff = Backoff(base_seconds=3, max_seconds=30, jitter="full")
    with relay(OPTIONS={"max_attempts": 5, "timeout_seconds": 6, "backoff": backoff}):
        job = Job.objects.get(pk=tasks.noop.using(timeout_seconds=7).enqueue().id)
    assert (job.max_attempts, job.timeout_seconds) == (5, 7)
    assert (job.backoff_base_seconds, job.backoff_jitter) == (3, "full")


def test_unknown_option_of_the_alias_refuses_every_enqueue() -> None:
    with relay(OPTIONS={"attempts": 5}), pytest.raises(InvalidJob, match="it has attempts;"):
        tasks.noop.enqueue()
    assert not Job.objects.exists()


def test_terms_that_a_backend_remembers_follow_the_settings() -> None:
    assert Job.objects.get(pk=tasks.noop.enqueue().id).max_attempts == 3
    with override_settings(RELAY={"MAX_ATTEMPTS": 7}):
        assert Job.objects.get(pk=tasks.noop.enqueue().id).max_attempts == 7
    assert Job.objects.get(pk=tasks.noop.enqueue().id).max_attempts == 3


def test_tasks_made_for_one_call_take_no_room_in_what_a_backend_remembers(
    backend: RelayBackend,
) -> None:
    tasks.noop.enqueue()
    remembered = list(backend._remembered)
    later = timezone.now() + timedelta(hours=1)
    for number in range(5):
        tasks.noop.using(idempotency_key=str(number), wait_seconds=number).enqueue()
        tasks.noop.using(run_after=later + timedelta(seconds=number)).enqueue()
    assert list(backend._remembered) == remembered
    due = Job.objects.exclude(state="ready").order_by("id").values_list("available_at", flat=True)
    assert list(due) == [later + timedelta(seconds=number) for number in range(5)]


def test_backend_remembers_a_bounded_number_of_kinds_of_tasks(backend: RelayBackend) -> None:
    made = [tasks.noop.using(lease_seconds=10 + n / 1000) for n in range(MOST_REMEMBERED + 1)]
    backend.enqueue_many([one.bind() for one in made])
    assert 0 < len(backend._remembered) < MOST_REMEMBERED
    assert Job.objects.count() == len(made)


@pytest.mark.parametrize(
    "options",
    [
        {"idempotency_key": ""},
        {"idempotency_key": "k" * 256},
        {"idempotency_key": 7},
        {"run_after": datetime(2030, 1, 1)},
        {"run_after": "tomorrow"},
        {"run_after": datetime(9999, 12, 31, tzinfo=UTC)},
        {"wait_seconds": -1},
        {"wait_seconds": True},
        {"max_attempts": True},
        {"max_attempts": 1.0},
        {"priority": True},
        {"lease_seconds": [60]},
        {"retry_on": [ValueError]},
    ],
    ids=str,
)
def test_an_option_is_refused_in_the_same_words_of_a_task_that_was_validated_before(
    options: dict[str, Any],
) -> None:
    with relay(), pytest.raises(InvalidTask) as first:
        replace(tasks.noop, **options)
    with relay():
        for like in ({}, {"max_attempts": 1}, {"priority": 1}):
            tasks.noop.using(**like).enqueue()
        with pytest.raises(InvalidTask) as again:
            replace(tasks.noop, **options)
    assert str(again.value) == str(first.value)


def test_a_task_is_validated_again_when_the_settings_have_changed() -> None:
    tasks.noop.using(lease_seconds=30).enqueue()
    shorter = override_settings(RELAY={"MAX_LEASE_SECONDS": 20, "LEASE_SECONDS": 10})
    with shorter, pytest.raises(InvalidTask, match="lease_seconds"):
        tasks.noop.using(lease_seconds=30)
    assert tasks.noop.using(lease_seconds=30).enqueue().id


def test_run_after_defers_the_job() -> None:
    later = timezone.now() + timedelta(hours=1)
    result = tasks.noop.using(run_after=later).enqueue()
    assert Job.objects.get(pk=result.id).state == "scheduled"
    assert result.status == TaskResultStatus.READY


def test_queues_of_the_alias_are_honoured() -> None:
    with relay(QUEUES=["default", "mail"]):
        assert tasks.noop.using(queue_name="mail").enqueue().id
        with pytest.raises(InvalidTask, match="typo"):
            tasks.noop.using(queue_name="typo")


def test_enqueue_rolls_back_with_the_callers_transaction() -> None:
    def enqueue_and_fail() -> None:
        with transaction.atomic():
            tasks.noop.enqueue()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        enqueue_and_fail()
    assert not Job.objects.exists()


@pytest.mark.parametrize("value", [object(), {1}, b"\xff", float("nan"), "\ud800", {1: 2}])
def test_arguments_that_are_no_json_are_refused_and_nothing_is_written(value: Any) -> None:
    with pytest.raises(PayloadError, match="args"):
        tasks.echo.enqueue(value)
    assert not Job.objects.exists()


def test_task_that_no_worker_could_find_is_refused_at_enqueue() -> None:
    nameless = task(tasks.plain)
    with pytest.raises(UnknownTask, match="is a function, not a task"):
        nameless.enqueue(1)
    assert not Job.objects.exists()


def test_full_queue_refuses_and_inside_atomic_does_not_wait() -> None:
    with store.transaction() as tx:
        store.ensure_queue(tx, "small")
        store.set_limits(tx, "small", capacity=1, max_running=None)
    small = tasks.noop.using(queue_name="small")
    small.enqueue()
    with pytest.raises(QueueFull):
        small.enqueue()
    with pytest.raises(QueueFull):
        small.using(wait_seconds=60).enqueue()


def test_second_enqueue_with_a_key_returns_the_existing_job(
    enqueued_signals: list[tuple[type, str]],
) -> None:
    keyed = tasks.add.using(idempotency_key="once")
    first = keyed.enqueue(1, 2)
    assert run_pending() == 1
    again = keyed.enqueue(1, 2)
    assert again.id == first.id
    assert again.return_value == 3
    assert len(enqueued_signals) == 1
    with pytest.raises(IdempotencyConflict):
        keyed.enqueue(1, 3)


def test_enqueue_from_a_coroutine() -> None:
    async def enqueue() -> Any:
        result = await tasks.add.aenqueue(1, 2)
        return await tasks.add.aget_result(result.id)

    assert async_to_sync(enqueue)().args == [1, 2]


# --- Signals -------------------------------------------------------------------------------


def test_enqueued_signal_is_sent_with_the_backends_class(
    enqueued_signals: list[tuple[type, str]],
) -> None:
    result = tasks.noop.enqueue()
    assert enqueued_signals == [(RelayBackend, result.id)]


def test_failing_receiver_does_not_fail_the_enqueue() -> None:
    def broken(**kwargs: Any) -> None:
        raise ValueError("receiver")

    signals.task_enqueued.connect(broken)
    try:
        assert Job.objects.filter(pk=tasks.noop.enqueue().id).exists()
    finally:
        signals.task_enqueued.disconnect(broken)


# --- Many ----------------------------------------------------------------------------------


def test_enqueue_many_returns_results_in_order(
    backend: RelayBackend, enqueued_signals: list[tuple[type, str]]
) -> None:
    mail = tasks.add.using(queue_name="mail")
    calls: list[Any] = [((tasks.add, mail)[n % 2], (n,), {"right": 1}) for n in range(50)]
    results = backend.enqueue_many(iter(calls))
    assert [result.args for result in results] == [[n] for n in range(50)]
    assert results[-1].task.queue_name == "mail"
    assert len(results[10:20]) == 10
    assert results[10:20][0].id == results[10].id == results.ids[10]
    assert Job.objects.count() == len(results) == 50
    assert enqueued_signals == []
    assert run_pending() == 50
    assert backend.get_result(results.ids[7]).return_value == 8


def test_enqueue_many_is_all_or_nothing(backend: RelayBackend) -> None:
    with pytest.raises(PayloadError):
        backend.enqueue_many([(tasks.echo, (1,), {}), (tasks.echo, (object(),), {})])
    assert not Job.objects.exists()
    assert list(backend.enqueue_many([])) == []


def test_enqueue_many_gives_the_existing_job_of_a_key(backend: RelayBackend) -> None:
    keyed = tasks.add.using(idempotency_key="once")
    first = keyed.enqueue(1, 2)
    run_pending()
    again = async_to_sync(backend.aenqueue_many)([(keyed, (1, 2), {}), (keyed, (1, 2), {})])
    assert again.ids == [first.id, first.id]
    assert again[0].return_value == 3


# --- Results -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result_id",
    ["0", "-1", "1.5", "abc", "", "٣", " 1", "9" * 19, "9" * 5000, "123456", "f3a9" * 8],
)
def test_unknown_ids_do_not_exist(backend: RelayBackend, result_id: str) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(result_id)


def test_result_tells_a_jobs_whole_life() -> None:
    result = tasks.add.enqueue(1, 2)
    claim = claim_one()
    result.refresh()
    assert result.status == TaskResultStatus.RUNNING
    assert result.started_at == result.last_attempted_at == claim.acquired_at
    settle(claim, "ack", result='{"sum":3}')
    result.refresh()
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert result.return_value == {"sum": 3}
    assert result.finished_at is not None
    assert result.attempts == 1


def test_failed_attempts_are_errors_in_order() -> None:
    result = tasks.noop.using(max_attempts=2).enqueue()
    settle(claim_one(), error="builtins.KeyError", traceback="first", delay_seconds=0)
    result.refresh()
    assert result.status == TaskResultStatus.READY
    with store.transaction() as tx:
        store.promote(tx)
    settle(claim_one(), timed_out=True)
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert [error.exception_class for error in result.errors] == [KeyError, TimedOut]
    assert [error.traceback for error in result.errors] == ["first", "attempt 2: Timed out"]
    assert result.attempts == 2
    with pytest.raises(ValueError, match="failed"):
        result.return_value  # noqa: B018


def test_uncharged_attempts_are_neither_errors_nor_attempts() -> None:
    result = tasks.noop.enqueue()
    settle(claim_one(), "release")
    settle(claim_one(), "snooze", delay_seconds=60)
    result.refresh()
    assert (result.status, result.attempts, result.errors) == (TaskResultStatus.READY, 0, [])


def test_cancelled_job_failed_with_an_error_that_says_so() -> None:
    result = tasks.noop.enqueue()
    with store.transaction() as tx:
        store.cancel(tx, [int(result.id)])
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    (error,) = result.errors
    assert error.exception_class is Cancelled
    assert "cancelled" in error.traceback


def test_worker_ids_are_incarnations_of_charged_leases() -> None:
    result = tasks.noop.enqueue()
    for incarnation, verb in [("a" * 32, "nack"), ("b" * 32, "release"), ("c" * 32, "ack")]:
        worker = Worker.objects.create(
            incarnation=incarnation, pid=1, concurrency=1, started_at=NOON, heartbeat_at=NOON
        )
        settle(claim_one(worker.pk), verb, result="null", delay_seconds=0)
        with store.transaction() as tx:
            store.promote(tx)
    result.refresh()
    assert result.worker_ids == ["a" * 32, "c" * 32]


def test_result_of_a_vanished_task_is_a_mismatch(backend: RelayBackend) -> None:
    with store.transaction() as tx:
        enqueued = store.enqueue(tx, store.new_job(task="tests.tasks.removed"))
    with pytest.raises(TaskResultMismatch, match=r"tests\.tasks\.removed"):
        backend.get_result(str(enqueued.job_id))


def test_result_of_another_task_is_a_mismatch() -> None:
    with pytest.raises(TaskResultMismatch):
        tasks.noop.get_result(tasks.add.enqueue(1).id)


def test_result_carries_queue_and_priority_of_the_job(backend: RelayBackend) -> None:
    enqueued = tasks.noop.using(queue_name="mail", priority=3).enqueue()
    found = backend.get_result(enqueued.id)
    assert (found.task.queue_name, found.task.priority) == ("mail", 3)


def test_reading_a_result_takes_two_queries(backend: RelayBackend) -> None:
    result = tasks.noop.enqueue()
    with CaptureQueriesContext(connection) as queries:
        backend.get_result(result.id)
    assert len(queries) == 2


@pytest.mark.django_db(transaction=True)
def test_enqueue_inside_atomic_is_invisible_until_the_commit() -> None:
    with transaction.atomic():
        Group.objects.create(name="with the job")
        result = tasks.noop.enqueue()
        assert asyncio.run(_jobs_seen_elsewhere()) == 0
    assert asyncio.run(_jobs_seen_elsewhere()) == 1
    assert result.status == TaskResultStatus.READY


async def _jobs_seen_elsewhere() -> int:
    def count() -> int:
        try:
            return Job.objects.count()
        finally:
            connection.close()

    return await asyncio.to_thread(count)
