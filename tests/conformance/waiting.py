"""What the helpers for tests say of jobs that wait for a commit. Run by Django's runner on `dedicated`.

Not named as tests of this suite: they need a queue in a database of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import transaction
from django.test import TestCase, TransactionTestCase

from relay_queue import enqueue_many
from relay_queue.compat import TaskResultStatus
from relay_queue.testing import (
    assert_enqueued,
    assert_not_enqueued,
    capture_enqueued,
    enqueued,
    run_on_enqueue,
    run_pending,
)
from tests import tasks

SAID = r"wait for the commit(?s:.)*\n- tests\.tasks\.note (?s:.)*captureOnCommitCallbacks"


class InTestCase(TestCase):
    """The commit never comes, unless it is pretended."""

    databases = "__all__"

    def test_run_pending_warns_at_the_line_of_the_test(self) -> None:
        tasks.note.enqueue("x")
        with self.assertWarnsRegex(UserWarning, SAID) as seen:
            assert run_pending() == 0
        assert seen.filename == __file__

    def test_capture_warns_at_the_line_of_the_test(self) -> None:
        with self.assertWarnsRegex(UserWarning, SAID) as seen, capture_enqueued() as captured:
            tasks.note.enqueue("x")
        assert (captured, seen.filename) == ([], __file__)

    def test_the_list_of_all_warns(self) -> None:
        enqueue_many([tasks.note.bind("x"), tasks.note.bind("y")])
        with self.assertWarnsRegex(UserWarning, SAID) as seen:
            assert enqueued() == []
        assert seen.filename == __file__
        assert str(seen.warning).count("tests.tasks.note") == 2

    def test_an_assertion_that_fails_says_so(self) -> None:
        tasks.note.enqueue("x")
        with pytest.raises(AssertionError, match=SAID):
            assert_enqueued(tasks.note)

    def test_a_job_that_waits_counts_as_enqueued(self) -> None:
        assert_not_enqueued()
        tasks.note.enqueue("x")
        for task in (None, tasks.note):
            with pytest.raises(AssertionError, match=SAID):
                assert_not_enqueued(task)
        assert_not_enqueued(tasks.add)
        assert_not_enqueued(queue="other")

    def test_nothing_is_said_once_the_commit_was_pretended(self) -> None:
        with quiet(), capture_enqueued() as captured:
            with self.captureOnCommitCallbacks(execute=True):
                tasks.note.enqueue("x")
            assert_enqueued(tasks.note, count=1)
            assert run_pending() == 1
        assert len(captured) == 1

    def test_nothing_is_said_of_what_was_rolled_back(self) -> None:
        with transaction.atomic():
            tasks.note.enqueue("x")
            transaction.set_rollback(True)
        with quiet():
            assert run_pending() == 0
            assert_not_enqueued()

    def test_jobs_that_run_on_enqueue_wait_for_no_commit(self) -> None:
        with quiet(), run_on_enqueue():
            assert tasks.note.enqueue("x").status == TaskResultStatus.SUCCESSFUL
            (result,) = enqueue_many([tasks.note.bind("y")])
            assert result.status == TaskResultStatus.SUCCESSFUL
            assert run_pending() == 0


class InTransactionTestCase(TransactionTestCase):
    """The commit comes at the end of each block."""

    databases = "__all__"

    def test_nothing_is_said_after_a_commit(self) -> None:
        with quiet(), capture_enqueued() as captured:
            tasks.note.enqueue("x")
            with transaction.atomic():
                tasks.note.enqueue("y")
            assert_enqueued(tasks.note, count=2)
            assert run_pending() == 2
        assert len(captured) == 2

    def test_inside_a_block_the_job_still_waits(self) -> None:
        with transaction.atomic():
            tasks.note.enqueue("x")
            with self.assertWarnsRegex(UserWarning, SAID):
                assert run_pending() == 0
        with quiet():
            assert run_pending() == 1


@contextmanager
def quiet() -> Iterator[None]:
    """Make every warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
