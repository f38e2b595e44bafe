"""What a test runner puts on a connection to keep a test off the database stops Relay, too."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import SimpleTestCase, TestCase
from django.test.testcases import DatabaseOperationForbidden

from relay_queue import conf, enqueue_many, pause
from relay_queue.db.fast_atomic import SHORTENED, is_watched
from relay_queue.models import Job, Queue
from relay_queue.store.dialects import dialect_for
from tests import tasks


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


@pytest.fixture(params=["open", "closed"])
def connection(request: pytest.FixtureRequest, transactional_db: None) -> Any:
    """Return the queue's connection. Runners find it open or not; one in memory stays open."""
    connection: Any = connections[conf.get().database]
    connection.ensure_connection()
    for name in SHORTENED & vars(connection).keys():
        delattr(connection, name)  # left by an earlier test case of Django's
    if request.param == "closed":
        connection.close()
    return connection


def enqueue_one() -> None:
    tasks.noop.enqueue()


def enqueue_two() -> None:
    enqueue_many([tasks.noop.bind(), tasks.noop.bind()])


def pause_one() -> None:
    pause("default")


every_write = pytest.mark.parametrize("write", [enqueue_one, enqueue_two, pause_one])


def nothing_is_written() -> bool:
    return not Job.objects.exists() and not Queue.objects.exclude(paused_at=None).exists()


def run_case(base: type[SimpleTestCase], databases: set[str], act: Callable[[], None]) -> None:
    """Run ``act`` as the one test of a class of Django's; raises what it raises."""
    raised: list[BaseException] = []

    class Case(base):  # type: ignore[valid-type, misc]
        def runTest(self) -> None:
            try:
                act()
            except BaseException as error:
                raised.append(error)

    Case.databases = databases
    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])
    if raised:
        raise raised[0]


@pytest.mark.parametrize("base", [SimpleTestCase, TestCase])
@every_write
def test_a_test_case_that_does_not_list_the_database_may_not_write_to_it(
    connection: Any, base: type[SimpleTestCase], write: Callable[[], None]
) -> None:
    with pytest.raises(DatabaseOperationForbidden):
        run_case(base, set(), write)
    assert nothing_is_written()
    write()  # and the guard is gone with its test
    assert not nothing_is_written()


def test_a_test_case_that_lists_the_database_writes_and_rolls_back(connection: Any) -> None:
    seen: list[int] = []

    def act() -> None:
        enqueue_one()
        seen.append(Job.objects.count())

    run_case(TestCase, {connection.alias}, act)
    assert (seen, Job.objects.count()) == ([1], 0)


@every_write
def test_a_runner_that_blocks_ensure_connection_blocks_a_write(
    connection: Any, write: Callable[[], None]
) -> None:
    refusal = mock.Mock(side_effect=RuntimeError("Database access not allowed"))
    with (
        mock.patch.object(BaseDatabaseWrapper, "ensure_connection", refusal),
        pytest.raises(RuntimeError, match="not allowed"),
    ):
        write()
    assert nothing_is_written()


@pytest.mark.parametrize("on", ["instance", "class"])
@every_write
def test_a_cursor_that_was_replaced_gets_every_statement(
    connection: Any, write: Callable[[], None], on: str
) -> None:
    refusal = mock.Mock(side_effect=RuntimeError("no cursors here"))
    target = connection if on == "instance" else BaseDatabaseWrapper
    with (
        mock.patch.object(target, "cursor", refusal),
        pytest.raises(RuntimeError, match="no cursors"),
    ):
        write()
    assert nothing_is_written()


def test_a_cursor_that_only_looks_on_sees_the_statements_of_an_enqueue(connection: Any) -> None:
    opened: list[Any] = []
    real = connection.cursor

    def cursor(*args: Any, **kwargs: Any) -> Any:
        opened.append(real(*args, **kwargs))
        return opened[-1]

    with mock.patch.object(connection, "cursor", cursor):
        enqueue_one()
    assert opened
    assert Job.objects.count() == 1


def test_a_connection_whose_guard_was_taken_away_has_the_short_ways_again(connection: Any) -> None:
    """Django's test cases leave the class's own methods on the instance."""
    assert not is_watched(connection)
    run_case(SimpleTestCase, set(), lambda: None)
    assert "cursor" in vars(connection)
    assert not is_watched(connection)
    with mock.patch.object(connection, "cursor", mock.Mock()):
        assert is_watched(connection)
    dialect = dialect_for(connection)
    with (
        mock.patch.object(dialect, "cursor", side_effect=LookupError("short")),
        pytest.raises(LookupError, match="short"),
    ):
        enqueue_one()
