"""The front door: what a program may do to jobs and queues, by public names only."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, override_settings
from django.utils import timezone

import relay_queue
from relay_queue import Changed, operations, store
from relay_queue.compat import TaskResultStatus, task_backends
from relay_queue.exceptions import (
    ConfigurationError,
    InvalidJob,
    InvalidTransition,
    JobNotFound,
    QueueFull,
    UnknownQueue,
    WaitTimeout,
)
from relay_queue.models import Job, Queue
from relay_queue.results import new_result
from relay_queue.testing import run_on_enqueue, run_pending
from tests import tasks
from tests.conftest import ROOT
from tests.store import actions

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


@pytest.fixture
def rings() -> Iterator[mock.Mock]:
    with mock.patch("relay_queue.wakeup.ring") as ring:
        yield ring


def scheduled() -> int:
    later = timezone.now() + timedelta(hours=1)
    return int(tasks.noop.using(run_after=later).enqueue().id)


def ready() -> int:
    return int(tasks.noop.enqueue().id)


def running() -> int:
    job_id = ready()
    assert actions.claim_one().job_id == job_id
    return job_id


def dead() -> int:
    job_id = ready()
    actions.nack(actions.claim_one(), fatal=True)
    return job_id


def cancelled() -> int:
    job_id = ready()
    actions.cancel(job_id)
    return job_id


def succeeded() -> int:
    job_id = ready()
    actions.ack(actions.claim_one())
    return job_id


def state(job_id: int) -> str | None:
    return Job.objects.filter(pk=job_id).values_list("state", flat=True).first()


# --- Names ---------------------------------------------------------------------

LOOK = """
import sys
import relay_queue
loaded = [name for name in sys.modules if name.startswith(("django", "relay_queue."))]
assert not loaded, loaded
for name in relay_queue.__all__:
    getattr(relay_queue, name)
assert set(relay_queue.__all__) <= set(dir(relay_queue))
assert "relay_queue.models" not in sys.modules
assert not [name for name in sys.modules if name.startswith("relay_queue.worker")]
"""


def test_importing_the_package_loads_nothing_and_its_names_need_no_settings() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_public_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'relay_queue' has no attribute 'ring_on_commit'"):
        relay_queue.ring_on_commit  # noqa: B018
    with pytest.raises(ImportError):
        exec("from relay_queue import ring_on_commit")


def test_every_function_has_a_form_for_coroutines() -> None:
    functions = {
        name
        for name in relay_queue.__all__
        if name.islower() and name not in {"current_context", "wait_for", "await_for"}
    }
    plain = {name for name in functions if f"a{name}" in functions}
    assert functions == plain | {f"a{name}" for name in plain}
    assert len(plain) > 15


# --- One job -------------------------------------------------------------------

ONE: list[tuple[Callable[[], int], Callable[[Any], None], str | None]] = [
    (running, relay_queue.cancel, "cancelled"),
    (dead, relay_queue.requeue, "ready"),
    (cancelled, relay_queue.requeue, "ready"),
    (scheduled, relay_queue.run_now, "ready"),
    (running, relay_queue.release, "ready"),
    (dead, relay_queue.discard, None),
    (ready, lambda job: relay_queue.set_priority(job, 7), "ready"),
]


@pytest.mark.parametrize(("make", "function", "then"), ONE)
def test_a_function_changes_one_job(
    make: Callable[[], int], function: Callable[[Any], None], then: str | None
) -> None:
    job_id, other = make(), ready()
    function(job_id)
    assert state(job_id) == then
    assert state(other) == "ready"
    actions.assert_counters_exact()


def test_a_priority_is_stored_and_one_out_of_bounds_refused() -> None:
    job_id = ready()
    relay_queue.set_priority(job_id, 7)
    assert relay_queue.get_job(job_id).priority == 7
    with pytest.raises(InvalidJob, match="priority is 101; it must be between -100 and 100"):
        relay_queue.set_priority(job_id, 101)


NAMES: list[Callable[[int], Any]] = [
    int,
    str,
    lambda job_id: tasks.noop.get_result(str(job_id)),
    relay_queue.get_job,
    lambda job_id: Job.objects.get(pk=job_id),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_can_be_named_in_several_ways(name: Callable[[int], Any]) -> None:
    job_id = ready()
    relay_queue.cancel(name(job_id))
    assert state(job_id) == "cancelled"


REFUSED: list[tuple[Callable[[Any], None], Callable[[], int], str | None]] = [
    (relay_queue.cancel, succeeded, "cancelled"),
    (relay_queue.requeue, running, "ready"),
    (relay_queue.run_now, dead, "ready"),
    (relay_queue.release, dead, "ready"),
    (relay_queue.discard, ready, None),
    (lambda job: relay_queue.set_priority(job, 1), succeeded, None),
]


@pytest.mark.parametrize(("function", "make", "to_state"), REFUSED)
def test_a_function_that_does_not_apply_changes_nothing(
    function: Callable[[Any], None], make: Callable[[], int], to_state: str | None
) -> None:
    job_id = make()
    with actions.nothing_written(), pytest.raises(InvalidTransition) as caught:
        function(job_id)
    error = caught.value
    assert (error.job_id, error.from_state, error.to_state) == (job_id, state(job_id), to_state)


def test_a_refusal_names_the_job_its_state_and_what_the_function_is_for() -> None:
    job_id = succeeded()
    words = (
        rf"job {job_id} is succeeded; cancel is only for jobs that are scheduled, ready, running or "
        r"retrying\. Nothing was changed\."
    )
    with pytest.raises(InvalidTransition, match=words):
        relay_queue.cancel(job_id)


@pytest.mark.parametrize(
    "job", [77, "77", 0, -1, 2**70, "9" * 5_000, "7e1", "\x00", "c0ffee00-5f0c-4b4b", "٧"]
)
def test_what_names_no_job_is_not_found(job: Any) -> None:
    for function in (relay_queue.cancel, relay_queue.get_job, relay_queue.discard):
        with pytest.raises(JobNotFound, match="there is no job"):
            function(job)


def test_a_result_whose_job_is_not_written_yet_says_so() -> None:
    waiting = new_result((tasks.noop, [], {}), "default")
    with pytest.raises(JobNotFound, match=r"written when the transaction .* commits"):
        relay_queue.cancel(waiting)


@pytest.mark.parametrize("job", [None, True, 7.0, b"7", object(), [7]])
def test_what_is_no_job_at_all_is_a_type_error(job: Any) -> None:
    with pytest.raises(TypeError, match="names no job; give the id of a job, or the result"):
        relay_queue.cancel(job)


def test_a_job_is_looked_at() -> None:
    job_id = int(tasks.noop.using(idempotency_key="k", priority=3).enqueue().id)
    seen = relay_queue.get_job(job_id)
    assert (seen.id, seen.queue, seen.task) == (job_id, "default", tasks.noop.module_path)
    assert (seen.state, seen.attempt, seen.priority) == (relay_queue.State.READY, 0, 3)
    assert (seen.idempotency_key, seen.is_finished, seen.finished_at) == ("k", False, None)
    run_pending()
    seen = relay_queue.get_job(job_id)
    assert (seen.state, seen.attempt, seen.is_finished) == (relay_queue.State.SUCCEEDED, 1, True)
    assert seen.finished_at is not None


# --- Many jobs -----------------------------------------------------------------


def test_many_are_changed_in_bounded_transactions_and_the_others_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "BATCH", 2)
    done, jobs = succeeded(), [ready() for _ in range(5)]
    with mock.patch.object(
        store, "in_transaction", side_effect=store.in_transaction, autospec=True
    ) as begun:
        changed = relay_queue.cancel_many([*jobs, jobs[0], done, 404, -1])
    assert changed == Changed(jobs, {done: "succeeded"})
    assert changed.missing == [404, -1]
    assert begun.call_count == 4
    assert {state(job_id) for job_id in jobs} == {"cancelled"}


def test_many_of_none_is_nothing() -> None:
    assert relay_queue.cancel_many([]) == Changed()


@pytest.mark.parametrize("one", ["417", b"417"])
def test_one_id_is_not_taken_for_the_ids_of_several_jobs(one: Any) -> None:
    """Its characters would be ids of other jobs."""
    jobs = [ready() for _ in range(8)]
    for function in (relay_queue.cancel_many, relay_queue.discard_many, relay_queue.requeue_many):
        with pytest.raises(TypeError, match="one job and not several"):
            function(one)
    assert {state(job_id) for job_id in jobs} == {"ready"}


MANY: list[tuple[Callable[[], int], Callable[[Any], Changed]]] = [
    (ready, relay_queue.cancel_many),
    (dead, relay_queue.requeue_many),
    (scheduled, relay_queue.run_now_many),
    (running, relay_queue.release_many),
    (dead, relay_queue.discard_many),
    (ready, lambda jobs: relay_queue.set_priority_many(jobs, 2)),
]


@pytest.mark.parametrize(("make", "function"), MANY)
def test_a_function_changes_many_jobs(
    make: Callable[[], int], function: Callable[[Any], Changed]
) -> None:
    done, job_id = succeeded(), make()
    assert function([str(job_id), done]) == Changed([job_id], {done: "succeeded"})
    actions.assert_counters_exact()


def test_a_full_queue_stops_a_requeue_of_many_which_can_be_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "BATCH", 2)
    jobs = [dead() for _ in range(4)]
    relay_queue.set_limits("default", capacity=3)
    with pytest.raises(QueueFull):
        relay_queue.requeue_many(jobs)
    assert [state(job_id) for job_id in jobs] == ["ready", "ready", "dead", "dead"]
    relay_queue.set_limits("default", capacity=None)
    again = relay_queue.requeue_many(jobs)
    assert again == Changed(jobs[2:], {jobs[0]: "ready", jobs[1]: "ready"})


# --- Transactions and rings ----------------------------------------------------


def test_a_function_wakes_the_workers_after_its_own_commit(rings: mock.Mock) -> None:
    job_id = ready()
    rings.reset_mock()
    relay_queue.cancel(job_id)
    rings.assert_called_once_with("default")


def test_functions_join_the_callers_transaction_and_wake_when_it_commits(rings: mock.Mock) -> None:
    two, one = dead(), ready()
    rings.reset_mock()
    with suppress(LookupError), transaction.atomic():
        relay_queue.cancel(one)
        relay_queue.requeue_many([two])
        relay_queue.pause("default")
        raise LookupError
    assert (state(one), state(two)) == ("ready", "dead")
    assert Queue.objects.get(pk="default").paused_at is None
    rings.assert_not_called()
    with transaction.atomic():
        relay_queue.cancel(one)
        relay_queue.requeue_many([two])
        rings.assert_not_called()
    rings.assert_called_once_with("default")
    assert (state(one), state(two)) == ("cancelled", "ready")


def test_a_refusal_leaves_the_callers_transaction_usable() -> None:
    done, job_id = succeeded(), ready()
    with transaction.atomic():
        with pytest.raises(InvalidTransition):
            relay_queue.cancel(done)
        relay_queue.cancel(job_id)
    assert state(job_id) == "cancelled"


# --- Queues --------------------------------------------------------------------


def test_a_queue_is_paused_and_resumed() -> None:
    assert relay_queue.pause("mail")
    assert not relay_queue.pause("mail")
    assert Queue.objects.get(pk="mail").paused_at is not None
    assert relay_queue.resume("mail")
    assert not relay_queue.resume("mail")


def test_limits_that_are_not_named_stay() -> None:
    relay_queue.set_limits("mail", capacity=5, max_running=2)
    relay_queue.set_limits("mail", capacity=None)
    queue = Queue.objects.get(pk="mail")
    assert (queue.capacity, queue.max_running) == (None, 2)


def test_unusable_limits_and_queues_are_refused(settings: Any) -> None:
    with pytest.raises(TypeError, match="name capacity or max_running"):
        relay_queue.set_limits("mail")
    with pytest.raises(InvalidJob, match="capacity is -1; it must be between 0"):
        relay_queue.set_limits("mail", capacity=-1)
    settings.RELAY = {**settings.RELAY, "QUEUES": {"mail": {}}}
    for function in (relay_queue.pause, relay_queue.resume):
        with pytest.raises(UnknownQueue, match=r"no queue 'mial'; .* lists mail"):
            function("mial")


# --- Enqueue many --------------------------------------------------------------


def test_many_calls_are_enqueued_at_once(rings: mock.Mock) -> None:
    results = relay_queue.enqueue_many(tasks.noop.bind() for _ in range(3))
    assert isinstance(results, relay_queue.EnqueuedResults)
    assert [state(int(result_id)) for result_id in results.ids] == ["ready"] * 3
    assert results[0].status == TaskResultStatus.READY
    rings.assert_called_once_with("default")
    assert list(relay_queue.enqueue_many([])) == []


def test_calls_of_several_aliases_are_refused() -> None:
    backend = {"BACKEND": "relay_queue.backend.RelayBackend", "QUEUES": []}
    with (
        override_settings(TASKS={"default": backend, "bulk": backend}),
        pytest.raises(InvalidJob, match="aliases 'bulk', 'default' of TASKS"),
    ):
        relay_queue.enqueue_many([tasks.noop.bind(), tasks.noop.using(backend="bulk").bind()])
    assert not Job.objects.exists()


def test_a_backend_that_cannot_enqueue_many_is_named() -> None:
    dummy = type(tasks.noop).__mro__[1].__module__.rpartition(".")[0]
    backend = {"BACKEND": f"{dummy}.backends.dummy.DummyBackend", "QUEUES": []}
    with (
        override_settings(TASKS={"default": backend}),
        pytest.raises(ConfigurationError, match="is a DummyBackend, which enqueues one by one"),
    ):
        relay_queue.enqueue_many([tasks.noop.bind()])


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (tasks.noop, "tests.tasks.noop is a task; give a list of calls"),
        ([tasks.noop], r"number 0 of the calls is RelayTask.*make each with task\.bind"),
        ([tasks.noop.bind(), (tasks.noop, ())], r"number 1 of the calls .* of type tuple"),
        ([(len, (), {})], "number 0 of the calls"),
        (["abc"], "number 0 of the calls is 'abc', of type str"),
        (tasks.noop.bind(), "number 0 of the calls is RelayTask"),
    ],
)
@pytest.mark.django_db
def test_what_is_no_call_is_refused_with_how_to_make_one(calls: Any, message: str) -> None:
    for enqueue in (relay_queue.enqueue_many, task_backends["default"].enqueue_many):
        with pytest.raises(TypeError, match=message):
            enqueue(calls)
    assert not Job.objects.exists()


# --- Waiting -------------------------------------------------------------------


def finish_at_look(number: int) -> Any:
    """Return what stands for a sleep: at one of them the jobs run, as a worker would have done."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == number:
            run_pending()

    return mock.patch("relay_queue.api.time.sleep", sleep), pauses


def test_waiting_returns_the_result_with_growing_pauses() -> None:
    result = tasks.noop.enqueue()
    sleeps, pauses = finish_at_look(20)
    with sleeps:
        found = relay_queue.wait_for(result, timeout_seconds=3_600)
    assert found is result
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1], len(pauses)) == (0.01, 1.0, 20)


def test_waiting_for_an_id_returns_a_result_and_failures_are_results_too() -> None:
    assert relay_queue.wait_for(succeeded(), 0).status == TaskResultStatus.SUCCESSFUL
    assert relay_queue.wait_for(str(dead()), 0).status == TaskResultStatus.FAILED
    assert relay_queue.wait_for(cancelled(), 0).status == TaskResultStatus.FAILED


def test_a_wait_that_is_over_says_how_the_job_stands_and_leaves_it() -> None:
    job_id = scheduled()
    words = rf"job {job_id} is still scheduled after 0 s\. Wait longer with timeout_seconds="
    with pytest.raises(WaitTimeout, match=words) as caught:
        relay_queue.wait_for(job_id, timeout_seconds=0)
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.job_id, caught.value.state) == (job_id, "scheduled")
    assert state(job_id) == "scheduled"


def test_the_last_pause_does_not_go_past_the_end_of_the_wait() -> None:
    job_id, slept = scheduled(), 0.0
    begun = time.monotonic()
    with mock.patch("relay_queue.api.time") as clock:
        clock.monotonic = lambda: begun + slept

        def sleep(seconds: float) -> None:
            nonlocal slept
            slept += seconds

        clock.sleep = sleep
        with pytest.raises(WaitTimeout):
            relay_queue.wait_for(job_id, timeout_seconds=2.5)
    assert slept == pytest.approx(2.5)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), None, "5", True])
def test_a_time_that_cannot_be_waited_is_refused(seconds: Any) -> None:
    with pytest.raises(InvalidJob, match="timeout_seconds"):
        relay_queue.wait_for(ready(), timeout_seconds=seconds)


def test_waiting_for_what_is_gone_says_so() -> None:
    with pytest.raises(JobNotFound):
        relay_queue.wait_for(404, timeout_seconds=60)
    job_id = dead()
    relay_queue.discard(job_id)
    with pytest.raises(JobNotFound):
        relay_queue.wait_for(job_id, timeout_seconds=60)


def test_a_wait_inside_a_transaction_is_refused_unless_the_job_has_finished() -> None:
    done = succeeded()
    with transaction.atomic():
        job_id = ready()
        with pytest.raises(TransactionManagementError, match=rf"job {job_id} is ready, and a"):
            relay_queue.wait_for(job_id, timeout_seconds=60)
        assert relay_queue.wait_for(done, timeout_seconds=60).status == TaskResultStatus.SUCCESSFUL


def test_a_wait_without_autocommit_is_refused() -> None:
    job_id = ready()
    transaction.set_autocommit(False)
    try:
        with pytest.raises(TransactionManagementError, match="Wait after its commit"):
            relay_queue.wait_for(job_id, timeout_seconds=60)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def test_a_coroutine_waits_without_keeping_the_thread_of_synchronous_code() -> None:
    result = tasks.noop.enqueue()

    async def wait() -> tuple[Any, int]:
        waiting = asyncio.ensure_future(relay_queue.await_for(result, timeout_seconds=600))
        await asyncio.sleep(0)
        # In the same thread that the wait looks from; if that were kept, this would never run.
        attempts = await sync_to_async(run_pending, thread_sensitive=True)()
        return await waiting, attempts

    found, attempts = async_to_sync(wait)()
    assert attempts == 1
    assert found is result
    assert result.status == TaskResultStatus.SUCCESSFUL


def test_a_coroutine_is_told_when_the_time_is_over_and_inside_of_a_transaction() -> None:
    job_id = ready()
    with pytest.raises(WaitTimeout):
        async_to_sync(relay_queue.await_for)(job_id, timeout_seconds=0)
    with transaction.atomic(), pytest.raises(TransactionManagementError):
        async_to_sync(relay_queue.await_for)(job_id, timeout_seconds=60)


# --- Coroutines ----------------------------------------------------------------


def test_functions_work_from_coroutines_in_the_callers_transaction() -> None:
    done, job_id = dead(), ready()

    async def act() -> Any:
        await relay_queue.acancel(job_id)
        await relay_queue.apause("default")
        await relay_queue.aset_limits("default", capacity=9)
        changed = await relay_queue.arequeue_many([done, 404])
        results = await relay_queue.aenqueue_many([tasks.noop.bind()])
        return changed, (await relay_queue.aget_job(results[0])).state

    with suppress(LookupError), transaction.atomic():
        async_to_sync(act)()
        raise LookupError
    assert (state(job_id), state(done)) == ("ready", "dead")
    changed, found = async_to_sync(act)()
    assert (changed, changed.missing, found) == (Changed([done]), [404], "ready")
    assert state(job_id) == "cancelled"
    with pytest.raises(InvalidTransition):
        async_to_sync(relay_queue.acancel)(job_id)


def test_a_test_case_can_wait_for_what_ran_in_its_own_transaction() -> None:
    class Case(TestCase):
        def test_it(self) -> None:
            with run_on_enqueue():
                result = tasks.noop.enqueue()
            assert relay_queue.wait_for(result, 60).status == TaskResultStatus.SUCCESSFUL

    case = Case("test_it")
    with transaction.atomic():
        case.test_it()
