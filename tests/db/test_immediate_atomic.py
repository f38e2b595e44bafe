"""The short way into and out of a write transaction keeps the rules of Django's ``atomic``."""

from __future__ import annotations

from typing import Any, cast

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from relay_queue.db.gate import gate_of
from relay_queue.db.sqlite3.base import DatabaseWrapper

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def db() -> DatabaseWrapper:
    wrapper = cast(DatabaseWrapper, connections["default"])
    with wrapper.cursor() as cursor:
        cursor.execute("DELETE FROM relay_queue_queuecount")
    return wrapper


def insert(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO relay_queue_queuecount (queue, state, shard, n) VALUES (%s, 'x', 0, 1)",
            [name],
        )


def names() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT queue FROM relay_queue_queuecount ORDER BY queue")
        return [row[0] for row in cursor.fetchall()]


def usable(db: DatabaseWrapper) -> bool:
    gate = gate_of(db)
    held = gate is not None and gate.held_by_this_thread()
    return db.get_autocommit() and not db.in_atomic_block and not db.atomic_blocks and not held


def test_a_block_that_succeeds_is_committed(db: DatabaseWrapper) -> None:
    with db.immediate(5.0):
        assert (db.in_atomic_block, db.get_autocommit()) == (True, False)
        insert("a")
    assert names() == ["a"]
    assert usable(db)


def test_a_block_that_raises_is_rolled_back(db: DatabaseWrapper) -> None:
    with pytest.raises(ZeroDivisionError), db.immediate(5.0):  # noqa: PT012
        insert("a")
        _ = 1 / 0
    assert names() == []
    assert usable(db)


def test_inner_blocks_are_savepoints(db: DatabaseWrapper) -> None:
    with db.immediate(5.0):
        insert("a")
        with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
            insert("b")
            _ = 1 / 0
        with transaction.atomic():
            insert("c")
    assert names() == ["a", "c"]


def test_a_block_that_is_marked_for_rollback_is_rolled_back(db: DatabaseWrapper) -> None:
    with db.immediate(5.0):
        insert("a")
        transaction.set_rollback(True)
    assert names() == []
    assert usable(db)


def test_hooks_run_after_the_commit_with_the_gate_open(db: DatabaseWrapper) -> None:
    seen: list[Any] = []
    with db.immediate(5.0):
        insert("a")
        transaction.on_commit(lambda: seen.append((names(), usable(db))))
        assert seen == []
    assert seen == [(["a"], True)]


def test_hooks_of_a_rolled_back_block_do_not_run(db: DatabaseWrapper) -> None:
    seen: list[int] = []
    with pytest.raises(ZeroDivisionError), db.immediate(5.0):  # noqa: PT012
        transaction.on_commit(lambda: seen.append(1))
        _ = 1 / 0
    assert (seen, usable(db)) == ([], True)


def test_a_connection_closed_inside_loses_the_block_and_is_usable_again(
    db: DatabaseWrapper,
) -> None:
    with db.immediate(5.0):
        insert("a")
        db.close()
    assert names() == []
    assert usable(db)


def test_a_commit_that_fails_is_rolled_back_and_raises(db: DatabaseWrapper) -> None:
    with pytest.raises(Exception, match="FOREIGN KEY"), db.immediate(5.0), db.cursor() as cursor:  # noqa: PT012
        insert("a")
        cursor.execute(
            "INSERT INTO relay_queue_lease (job_id, attempt, token, acquired_at, expires_at,"
            " error, traceback, refused_verb, refused_reason)"
            " VALUES (-1, 1, 't', '2026-01-01', '2026-01-01', '', '', '', '')"
        )
    assert names() == []
    assert usable(db)


def test_waiting_ends_with_the_time_and_names_the_holder(db: DatabaseWrapper) -> None:
    import threading

    gate = gate_of(db)
    assert gate is not None
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with gate.acquire(60):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold, name="the-holder")
    thread.start()
    held.wait(60)
    try:
        with pytest.raises(OperationalError, match=r"database is locked.*the-holder"):
            db.immediate(0.05).__enter__()
    finally:
        done.set()
        thread.join(60)
    assert usable(db)


def test_whoever_watches_statements_sees_begin_and_commit(db: DatabaseWrapper) -> None:
    with CaptureQueriesContext(db) as queries, db.immediate(5.0):
        insert("a")
    statements = [query["sql"] for query in queries.captured_queries]
    assert statements[0] == "BEGIN IMMEDIATE"
    assert statements[-1] == "COMMIT"
    assert names() == ["a"]
