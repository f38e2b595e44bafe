"""Running what was enqueued, in a project's own tests."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import connection, transaction
from django.test import TestCase
from django.utils import timezone

from relay_queue.compat import TaskResultStatus
from relay_queue.models import Job
from relay_queue.testing import run_pending
from tests import tasks


@pytest.fixture(autouse=True)
def clean_notes() -> None:
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


@pytest.mark.django_db(transaction=True)
def test_jobs_of_a_rolled_back_transaction_do_not_run() -> None:
    with transaction.atomic():
        tasks.note.enqueue("never")
        transaction.set_rollback(True)
    assert run_pending() == 0
