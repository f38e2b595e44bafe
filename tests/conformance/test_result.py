"""The framework's ``TaskResult`` at every state of a job."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict, UserString, deque
from dataclasses import FrozenInstanceError
from datetime import datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.utils import timezone

from relay_queue import clock, enqueue_many, requeue, store
from relay_queue.compat import (
    AnyResult,
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
)
from relay_queue.context import JobContext
from relay_queue.exceptions import Cancelled, Lost, PayloadError
from relay_queue.models import Job
from relay_queue.store.records import Claim, Settlement
from relay_queue.testing import run_pending
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.executor import execute
from tests import tasks
from tests.worker.claims import claim_of

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL


def claim() -> Claim:
    with store.transaction() as tx:
        (claimed,) = store.claim(tx, worker_id=None, queues=["default"], limit=1)
    return claimed


def settle(claimed: Claim, verb: Any, **values: Any) -> None:
    told = Settlement(verb, claimed.lease_id, claimed.token, **values)
    with store.transaction() as tx:
        (settled,) = store.settle(tx, [told])
    assert settled.accepted


def nothing(result: AnyResult) -> None:
    pass


def defer(result: AnyResult) -> None:
    assert Job.objects.get(pk=result.id).state == "scheduled"


def start(result: AnyResult) -> None:
    claim()


def succeed(result: AnyResult) -> None:
    settle(claim(), "ack", result='{"sum":3}')


def fail_once(result: AnyResult) -> None:
    settle(claim(), "nack", error="builtins.KeyError", traceback="lines", delay_seconds=60)


def die(result: AnyResult) -> None:
    settle(claim(), "nack", error="builtins.KeyError", traceback="lines", fatal=True)


def snooze(result: AnyResult) -> None:
    settle(claim(), "snooze", delay_seconds=60)


def hand_back(result: AnyResult) -> None:
    settle(claim(), "release")


def lose(result: AnyResult) -> None:
    claim()
    with clock.use(lambda: datetime.now(clock.UTC) + timedelta(hours=1)), store.transaction() as tx:
        assert store.recover_expired(tx)


def cancel(result: AnyResult) -> None:
    with store.transaction() as tx:
        store.cancel(tx, [int(result.id)])


def cancel_running(result: AnyResult) -> None:
    claim()
    cancel(result)


def cancel_between_attempts(result: AnyResult) -> None:
    fail_once(result)
    cancel(result)


# What happens to a job; its state, status, attempts and errors then.
LIFE: list[tuple[Any, str, TaskResultStatus, int, list[type]]] = [
    (nothing, "ready", READY, 0, []),
    (defer, "scheduled", READY, 0, []),
    (start, "running", RUNNING, 1, []),
    (succeed, "succeeded", SUCCESSFUL, 1, []),
    (fail_once, "retrying", READY, 1, [KeyError]),
    (die, "dead", FAILED, 1, [KeyError]),
    (snooze, "scheduled", READY, 0, []),
    (hand_back, "ready", READY, 0, []),
    (lose, "ready", READY, 1, [Lost]),
    (cancel, "cancelled", FAILED, 0, [Cancelled]),
    (cancel_running, "cancelled", FAILED, 1, [Cancelled]),
    (cancel_between_attempts, "cancelled", FAILED, 1, [KeyError, Cancelled]),
]


@pytest.mark.parametrize("refresh", ["refresh", "arefresh"])
@pytest.mark.parametrize(
    ("happen", "state", "status", "attempts", "errors"),
    LIFE,
    ids=lambda v: getattr(v, "__name__", None),
)
def test_every_field_is_right_at_every_state(
    happen: Any,
    state: str,
    status: TaskResultStatus,
    attempts: int,
    errors: list[type],
    refresh: str,
) -> None:
    later = timezone.now() + timedelta(hours=1) if happen is defer else None
    result = tasks.add.using(run_after=later, priority=3).enqueue(1, right=2)
    happen(result)
    if refresh == "refresh":
        result.refresh()
    else:
        async_to_sync(result.arefresh)()
    job = Job.objects.get(pk=result.id)
    assert (job.state, result.status) == (state, status)
    assert result.attempts == len(result.worker_ids) == attempts
    assert [error.exception_class for error in result.errors] == errors
    assert all(error.traceback for error in result.errors)
    assert result.is_finished is (status in {FAILED, SUCCESSFUL})
    assert (result.task.func, result.task.priority) == (tasks.add.func, 3)
    assert (result.args, result.kwargs, result.backend) == ([1], {"right": 2}, "default")
    check_times(result, tried=happen not in {nothing, defer, cancel})


def check_times(result: AnyResult, *, tried: bool) -> None:
    times = [result.enqueued_at, result.started_at, result.last_attempted_at, result.finished_at]
    assert all(moment.utcoffset() == timedelta(0) for moment in times if moment)
    assert result.enqueued_at is not None
    assert (result.started_at is not None) is tried
    assert (result.last_attempted_at is not None) is tried
    assert (result.finished_at is not None) is result.is_finished
    assert sorted(filter(None, times)) == list(filter(None, times))


@pytest.mark.parametrize(
    ("happen", "message"),
    [
        (nothing, "not finished"),
        (start, "not finished"),
        (fail_once, "not finished"),
        (die, "failed"),
        (cancel, "failed"),
    ],
)
def test_return_value_raises_until_the_job_has_succeeded(happen: Any, message: str) -> None:
    result = tasks.add.enqueue(1)
    happen(result)
    result.refresh()
    with pytest.raises(ValueError, match=message):
        result.return_value  # noqa: B018


@pytest.mark.parametrize(
    "value", [None, 0, "", False, [1, {"a": None}], "ünïcode \x00", 2**70, 0.1]
)
def test_return_value_is_what_the_function_returned(value: Any) -> None:
    result = tasks.echo.enqueue(value)
    run_pending()
    result.refresh()
    assert result.status == SUCCESSFUL
    assert result.return_value == value
    assert type(result.return_value) is type(value)


def test_each_failed_attempt_is_an_error_with_its_traceback() -> None:
    result = tasks.fail.using(max_attempts=3).enqueue("the reason")
    now = timezone.now()
    assert sum(run_pending(at=now + timedelta(days=day)) for day in range(1, 4)) == 3
    result.refresh()
    assert (result.status, result.attempts) == (FAILED, 3)
    assert [error.exception_class_path for error in result.errors] == ["builtins.ValueError"] * 3
    assert all("raise ValueError(message)" in error.traceback for error in result.errors)
    assert all("the reason" in error.traceback for error in result.errors)


def test_exception_class_must_be_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tasks.noop.enqueue()
    settle(claim(), "nack", error="tests.tasks.plain", fatal=True)
    result.refresh()
    with pytest.raises(ValueError, match="valid exception"):
        result.errors[0].exception_class  # noqa: B018


def test_result_that_is_read_is_the_one_that_was_enqueued() -> None:
    later = timezone.now() + timedelta(hours=1)
    changed = tasks.add.using(priority=3, queue_name="mail", run_after=later, idempotency_key="k")
    for task in (tasks.add, changed):
        enqueued = task.enqueue(1, right=2)
        assert task.get_result(enqueued.id) == enqueued
    assert tasks.add.get_result(int(enqueued.id)).id == enqueued.id  # type: ignore[arg-type]


def test_run_after_is_kept_when_it_is_past_and_when_the_job_is_done() -> None:
    later = timezone.now() + timedelta(hours=1)
    task = tasks.add.using(run_after=later)
    result = task.enqueue(1)
    with clock.use(lambda: later + timedelta(hours=1)):
        assert tasks.add.get_result(result.id).task == task
        run_pending()
        done = tasks.add.get_result(result.id)
    assert (done.status, done.task) == (SUCCESSFUL, task)


@pytest.mark.parametrize("zone", [-14, 0, 14])
def test_the_far_future_is_admitted_as_far_as_it_can_be_stored(zone: int) -> None:
    last = datetime(9999, 12, 30, tzinfo=clock.UTC).astimezone(
        timezone.get_fixed_timezone(zone * 60)
    )
    result = tasks.add.using(run_after=last, priority=-100).enqueue(1)
    assert tasks.add.get_result(result.id).task.run_after == last
    assert run_pending() == 0
    assert enqueue_many([tasks.add.using(run_after=last).bind(1)]).ids
    with pytest.raises(InvalidTask, match=r"is too late; the last is 9999-12-30"):
        tasks.add.using(run_after=last + timedelta(seconds=1))


@pytest.mark.parametrize("hours", [-1, 1])
def test_run_after_is_kept_through_retries_and_a_requeue(hours: int) -> None:
    asked = timezone.now() + timedelta(hours=hours)
    task = tasks.fail.using(run_after=asked)
    result = task.enqueue()
    for number in range(2):
        run_pending(at=timezone.now() + timedelta(hours=2 + number))
        assert tasks.fail.get_result(result.id).task == task
    assert Job.objects.get(pk=result.id).available_at != asked
    cancel(result)
    requeue(int(result.id))
    assert tasks.fail.get_result(result.id).task == task


def test_run_after_is_kept_through_a_snooze() -> None:
    task = tasks.add.using(run_after=timezone.now() - timedelta(hours=1))
    result = task.enqueue(1)
    settle(claim(), "snooze", delay_seconds=60)
    assert tasks.add.get_result(result.id).task == task


def test_a_batch_keeps_run_after_for_the_jobs_that_asked_for_it() -> None:
    asked = timezone.now() + timedelta(hours=1)
    results = enqueue_many([tasks.add.using(run_after=asked).bind(1), tasks.add.bind(2)])
    results.refresh()
    assert [result.task.run_after for result in results] == [asked, None]


@pytest.mark.parametrize("task", [tasks.tell_history, tasks.tell_history_async])
def test_context_shows_the_first_start_and_the_errors_of_earlier_attempts(task: Any) -> None:
    tasks.calls.clear()
    result = task.enqueue()
    for hours in (0, 1, 2):
        run_pending(at=timezone.now() + timedelta(hours=hours))
    result.refresh()
    assert result.status == SUCCESSFUL
    attempts, starts, tries, errors = zip(*tasks.calls, strict=True)
    assert attempts == (1, 2, 3)
    assert set(starts) == {result.started_at}
    assert sorted(set(tries)) == list(tries)
    assert errors == ([], ["builtins.KeyError"], ["builtins.KeyError"] * 2)


def test_context_of_a_first_attempt_reads_nothing(django_assert_num_queries: Any) -> None:
    made_up = claim_of(tasks.tell_history)
    with django_assert_num_queries(0):
        execute(Attempt(made_up, JobContext.of(made_up)))


def test_result_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        tasks.noop.enqueue().status = FAILED  # type: ignore[misc]


def test_deleted_job_cannot_be_refreshed() -> None:
    result = tasks.noop.enqueue()
    Job.objects.all().delete()
    with pytest.raises(TaskResultDoesNotExist):
        result.refresh()
    with pytest.raises(TaskResultDoesNotExist):
        async_to_sync(result.arefresh)()


@pytest.mark.parametrize("happen", [nothing, start, succeed, die])
def test_results_are_picklable_and_copyable(happen: Any) -> None:
    result = tasks.add.enqueue(1)
    happen(result)
    result.refresh()
    for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert again == result
        again.refresh()
        assert again == result


# --- Arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        (b"text", "text"),
        ("ünïcode".encode(), "ünïcode"),
        (range(3), [0, 1, 2]),
        (deque([1, (2,)]), [1, [2]]),
        (UserDict(a=(1,)), {"a": [1]}),
        (
            {"nested": {"list": [b"x", None, True, 1.5]}},
            {"nested": {"list": ["x", None, True, 1.5]}},
        ),
        (TaskResultStatus.READY, "READY"),
    ],
)
def test_arguments_become_json_as_the_framework_makes_it(given: Any, stored: Any) -> None:
    results = [tasks.echo.enqueue(given), tasks.echo.enqueue(value=given)]
    assert results[0].args == [stored]
    assert results[1].kwargs == {"value": stored}
    assert run_pending() == 2
    for result in results:
        result.refresh()
        assert result.return_value == stored
        assert (*result.args, *result.kwargs.values()) == (stored,)


def _circle() -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


REFUSED: dict[str, tuple[Any, str]] = {
    "datetime": (lambda: timezone.now(), "isoformat"),
    "date": (lambda: timezone.now().date(), "isoformat"),
    "queryset": (lambda: Group.objects.all(), "primary keys"),
    "model": (lambda: Group(name="g"), "primary key"),
    "set": (lambda: {1}, "sorted"),
    "object": (object, "JSON"),
    "binary": (lambda: b"\xff", "base64"),
    "nan": (lambda: float("nan"), "nan"),
    "infinity": (lambda: float("-inf"), "inf"),
    "circle": (_circle, "contains itself"),
    "task": (lambda: tasks.add, "JSON"),
    "key": (lambda: {1: 2}, "key"),
    "long range": (lambda: range(10**12), "range"),
    "longest range": (lambda: range(10**30), "range"),
    "deep range": (lambda: deque([deque([range(10**12)])]), "deque"),
    "rope": (lambda: UserString("text"), "UserString"),
}


@pytest.mark.parametrize(("make", "hint"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_json_is_refused_with_its_place_and_a_way_out(make: Any, hint: str) -> None:
    for enqueue in (
        lambda: tasks.echo.enqueue([1, make()]),
        lambda: async_to_sync(tasks.echo.aenqueue)([1, make()]),
        lambda: tasks.echo.enqueue(value=[make()]),
    ):
        with pytest.raises(PayloadError, match=rf"(?is)args.*({hint})") as refusal:
            enqueue()
        # Projects that test for the framework's error keep their tests.
        assert isinstance(refusal.value, TypeError)
    assert not Job.objects.exists()


@pytest.mark.parametrize("make", [timezone.now, object, lambda: {1}, lambda: b"\xff"])
def test_a_refusal_begins_with_the_frameworks_words_and_goes_on_with_the_place(make: Any) -> None:
    value = make()
    with pytest.raises((TypeError, ValueError)) as theirs:
        normalize_json([value])
    with pytest.raises(type(theirs.value)) as ours:
        tasks.echo.enqueue([1, value])
    assert str(ours.value).startswith(f"{theirs.value}. args[0][1] ")
    assert ours.value.path == "args[0][1]"


def test_refused_arguments_leave_the_callers_transaction_usable() -> None:
    with pytest.raises(PayloadError):
        tasks.echo.enqueue(object())
    assert tasks.echo.enqueue(1).id
