"""Running and looking at what was enqueued, in a project's own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import connection, transaction
from django.test import TestCase as DjangoTestCase
from django.utils import timezone

from relay_queue import store
from relay_queue.compat import TaskResultStatus, task_backends
from relay_queue.models import Job
from relay_queue.testing import (
    assert_enqueued,
    assert_not_enqueued,
    capture_enqueued,
    enqueued,
    run_on_enqueue,
    run_pending,
)
from tests import tasks


class TestCase(DjangoTestCase):
    def setUp(self) -> None:
        tasks.calls.clear()


class RunPendingTests(TestCase):
    def test_nothing_to_run_is_no_attempt(self) -> None:
        assert run_pending() == 0

    def test_jobs_run_in_order_and_keep_their_results(self) -> None:
        results = [tasks.note.enqueue("a"), tasks.note.using(priority=1).enqueue("b")]
        assert run_pending() == 2
        assert tasks.calls == ["b", "a"]
        for result in results:
            result.refresh()
            assert result.status == TaskResultStatus.SUCCESSFUL
            assert result.worker_ids == [""]

    def test_only_the_named_queue_runs(self) -> None:
        tasks.note.using(queue_name="mail").enqueue("mail")
        tasks.note.enqueue("default")
        assert run_pending("mail") == 1
        assert tasks.calls == ["mail"]
        assert run_pending("no such queue") == 0

    def test_jobs_that_are_enqueued_meanwhile_run_too(self) -> None:
        tasks.enqueue_note.enqueue("later")
        assert run_pending() == 2
        assert tasks.calls == ["later"]

    def test_only_ready_jobs_run_when_asked(self) -> None:
        tasks.enqueue_note.enqueue("later")
        assert run_pending(until_empty=False) == 1
        assert tasks.calls == []

    def test_failure_fails_the_job_and_not_the_test(self) -> None:
        result = tasks.fail_once_only.enqueue()
        assert run_pending() == 1
        result.refresh()
        assert result.status == TaskResultStatus.FAILED
        assert result.errors[0].exception_class is ValueError

    def test_time_can_be_set_to_when_jobs_are_due(self) -> None:
        now = timezone.now()
        tasks.note.using(run_after=now + timedelta(hours=1)).enqueue("deferred")
        failing = tasks.fail.enqueue()
        assert run_pending() == 1
        assert run_pending(at=now + timedelta(minutes=1)) == 1
        assert run_pending(at=now + timedelta(hours=1)) == 2
        assert tasks.calls == ["deferred"]
        assert Job.objects.get(pk=failing.id).state == "dead"

    def test_functions_write_in_the_transaction_of_the_test(self) -> None:
        tasks.create_group.enqueue("group")
        tasks.create_group_atomically.enqueue("atomic")
        assert run_pending() == 2
        assert set(Group.objects.values_list("name", flat=True)) == {"group", "atomic"}
        assert connection.in_atomic_block

    def test_failing_atomic_function_rolls_back_alone(self) -> None:
        Group.objects.create(name="kept")
        tasks.create_group_atomically.enqueue("lost", then="fail")
        assert run_pending() == 1
        assert list(Group.objects.values_list("name", flat=True)) == ["kept"]

    def test_coroutine_functions_run_too(self) -> None:
        Group.objects.create(name="one")
        result = tasks.count_groups.enqueue()
        assert run_pending() == 1
        result.refresh()
        assert result.return_value == 1


class RunOnEnqueueTests(TestCase):
    def test_result_of_an_enqueue_has_finished(self) -> None:
        with run_on_enqueue():
            result = tasks.add.enqueue(1, right=2)
            assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, 3)
            assert async_to_sync(tasks.add.aenqueue)(2, 2).return_value == 4
            assert tasks.add_async.enqueue(3, 2).return_value == 5
            assert async_to_sync(tasks.add_async.aenqueue)(4, 2).return_value == 6
        assert tasks.add.enqueue(1).status == TaskResultStatus.READY

    @run_on_enqueue()
    def test_it_is_a_decorator_too(self) -> None:
        assert tasks.add.enqueue(1).is_finished

    def test_decorated_coroutine_functions_and_classes_run_with_it(self) -> None:
        @run_on_enqueue()
        async def enqueue() -> bool:
            return (await tasks.add.aenqueue(1)).is_finished

        @run_on_enqueue()
        class Case:
            async def test_it(self) -> bool:
                return (await tasks.add_async.aenqueue(1, 2)).is_finished

        assert async_to_sync(enqueue)()
        assert async_to_sync(Case().test_it)()

    def test_failure_is_in_the_result(self) -> None:
        with run_on_enqueue():
            dead, waiting = tasks.fail_once_only.enqueue(), tasks.fail.enqueue()
        assert dead.status == TaskResultStatus.FAILED
        assert dead.errors[0].exception_class is ValueError
        assert (waiting.status, waiting.attempts) == (TaskResultStatus.READY, 1)

    def test_jobs_that_a_job_enqueues_run_inside_of_it(self) -> None:
        with run_on_enqueue():
            tasks.enqueue_note.enqueue("inner")
        assert tasks.calls == ["inner"]
        assert not Job.objects.exclude(state="succeeded").exists()

    def test_many_run_at_once_too(self) -> None:
        backend: Any = task_backends["default"]
        with run_on_enqueue():
            results = backend.enqueue_many([tasks.add.bind(n, 1) for n in range(3)])
        assert [result.return_value for result in results] == [1, 2, 3]
        assert results[1:][0].return_value == 2

    def test_deferred_jobs_and_paused_queues_stay_as_they_are(self) -> None:
        with store.transaction() as tx:
            store.ensure_queue(tx, "paused")
            store.pause(tx, "paused")
        later = timezone.now() + timedelta(hours=1)
        with run_on_enqueue():
            assert not tasks.note.using(run_after=later).enqueue("later").is_finished
            assert not tasks.note.using(queue_name="paused").enqueue("paused").is_finished
        assert tasks.calls == []

    def test_jobs_of_the_queue_that_were_there_before_run_first(self) -> None:
        tasks.note.enqueue("before")
        tasks.note.using(queue_name="mail").enqueue("elsewhere")
        with run_on_enqueue():
            tasks.note.enqueue("now")
        assert tasks.calls == ["before", "now"]

    def test_functions_with_context_and_atomic_functions_run_too(self) -> None:
        with run_on_enqueue():
            assert tasks.describe.enqueue("hello").return_value["note"] == "hello"
            tasks.create_group_atomically.enqueue("atomic")
        assert Group.objects.filter(name="atomic").exists()


class LookingTests(TestCase):
    def test_enqueued_lists_jobs_in_order_whatever_their_state(self) -> None:
        first, second = tasks.note.enqueue(1), tasks.add.using(queue_name="mail").enqueue(2)
        run_pending("mail")
        assert [result.id for result in enqueued()] == [first.id, second.id]
        assert [result.id for result in enqueued(tasks.add)] == [second.id]
        assert [result.id for result in enqueued(queue="mail")] == [second.id]
        assert enqueued(tasks.add)[0].return_value == 2

    def test_capture_has_what_the_block_enqueued(self) -> None:
        tasks.note.enqueue("before")
        with capture_enqueued() as captured, capture_enqueued(tasks.add) as additions:
            tasks.note.enqueue("inside")
            tasks.add.enqueue(1)
        tasks.note.enqueue("after")
        assert [result.args for result in captured] == [["inside"], [1]]
        assert [result.args for result in additions] == [[1]]

    def test_assert_enqueued_returns_the_jobs_that_fit(self) -> None:
        tasks.add.enqueue(1, right=2)
        tasks.add.using(queue_name="mail").enqueue(1, right=3)
        assert len(assert_enqueued(tasks.add)) == 2
        (found,) = assert_enqueued(tasks.add, args=(1,), kwargs={"right": 3}, count=1)
        assert found.task.queue_name == "mail"
        assert_enqueued(tasks.add, args=[1], queue="mail", count=1)
        assert_enqueued(tasks.add.using(priority=5), count=2)
        assert_enqueued(tasks.note, count=0)

    def test_arguments_are_compared_as_they_are_stored(self) -> None:
        tasks.echo.enqueue((1, b"text"))
        assert_enqueued(tasks.echo, args=[(1, "text")], count=1)

    def test_assert_enqueued_tells_what_there_was_instead(self) -> None:
        with pytest.raises(AssertionError, match=r"at least one job .*found 0\. Nothing was"):
            assert_enqueued(tasks.add)
        tasks.add.enqueue(1)
        expected = r"expected 2 jobs of tests\.tasks\.add with args=\[1\], queue='mail', found 0"
        with pytest.raises(AssertionError, match=expected) as failure:
            assert_enqueued(tasks.add, args=[1], queue="mail", count=2)
        assert '- tests.tasks.add {"args":[1],"kwargs":{}} in default (ready)' in str(failure.value)
        with pytest.raises(AssertionError, match="kwargs="):
            assert_enqueued(tasks.add, kwargs={"right": 1})

    def test_assert_not_enqueued(self) -> None:
        assert_not_enqueued()
        tasks.add.enqueue(1)
        assert_not_enqueued(tasks.note)
        assert_not_enqueued(queue="mail")
        with pytest.raises(AssertionError, match="expected no job, found 1"):
            assert_not_enqueued(tasks.add)


def test_time_to_pretend_must_be_aware() -> None:
    with pytest.raises(ValueError, match="without a time zone"):
        run_pending(at=datetime(2030, 1, 1))


@pytest.mark.django_db
def test_plain_pytest_functions_need_nothing_but_the_database() -> None:
    with run_on_enqueue():
        assert tasks.add.enqueue(1, 2).return_value == 3


@pytest.mark.django_db(transaction=True)
def test_jobs_of_a_rolled_back_transaction_do_not_run() -> None:
    with transaction.atomic():
        tasks.note.enqueue("never")
        transaction.set_rollback(True)
    assert run_pending() == 0


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("engine", ["django.db.backends.sqlite3", "relay_queue.db.sqlite3"])
def test_all_of_this_works_in_memory_with_djangos_own_test_runner(engine: str) -> None:
    classes = [RunPendingTests, RunOnEnqueueTests, LookingTests]
    labels = [f"tests.unit.test_testing.{case.__name__}" for case in classes]
    environment = {**os.environ, "RELAY_MEMORY_ENGINE": engine}
    done = subprocess.run(
        [sys.executable, "-m", "django", "test", "-v2", "--settings=tests.unit.memory", *labels],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count = sum(name.startswith("test_") for case in classes for name in vars(case))
    assert f"Ran {count} tests" in done.stderr
    assert "mode=memory" in done.stderr or "memorydb" in done.stderr
