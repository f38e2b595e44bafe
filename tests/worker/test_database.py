"""A connection that does not answer is cut, and one that was lost is opened again."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from django.db import OperationalError, connection

from relay_queue.worker import database as module
from relay_queue.worker.database import Database, StallGuard
from tests.worker.monotonic import stop_time

pytestmark = pytest.mark.django_db(transaction=True)

LONG_SECONDS = 60.0


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[StallGuard]:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    guard = StallGuard()
    guard.seconds = 0.05
    yield guard
    guard.close()


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a connection; the first is the worker's."""
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_connection_that_does_not_answer_is_cut(
    guard: StallGuard, line: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = line
    theirs.settimeout(LONG_SECONDS)
    guard.watch(ours.fileno())
    guard.begin()
    assert (ours.recv(1), theirs.recv(1)) == (b"", b""), "both ends see it"
    assert guard.seconds == 0.1, "the next time it waits longer"
    guard.reset()
    assert guard.seconds == module.STALL_SECONDS


def test_a_connection_that_idles_is_not_cut(
    guard: StallGuard, line: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = line
    guard.seconds = LONG_SECONDS
    guard.watch(ours.fileno())
    guard.begin()
    guard.end()
    guard.seconds = 0.05
    theirs.settimeout(0.3)
    with pytest.raises(TimeoutError):
        theirs.recv(1)


def test_only_the_newest_connection_is_cut(
    guard: StallGuard, line: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = line
    new, other = socket.socketpair()
    with new, other:
        guard.watch(ours.fileno())
        guard.watch(new.fileno())
        guard.begin()
        assert new.recv(1) == b""
        theirs.send(b"!")
        assert ours.recv(1) == b"!"


def test_a_lost_connection_is_opened_again_and_the_loop_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool] = []
    clock = stop_time(monkeypatch, module)
    database = Database(lambda: told.append(True))
    connection.ensure_connection()
    database.mark_lost(OperationalError("gone"))
    assert (database.lost, connection.connection, told) == (True, None, [])
    refusals = [OperationalError("not yet")] * 2
    connect = connection.ensure_connection

    def refuse() -> None:
        if refusals:
            raise refusals.pop()
        connect()

    monkeypatch.setattr(connection, "ensure_connection", refuse)
    assert not database.usable()
    assert database.retry_in() > 0, "a server that is away is not asked without a pause"
    assert not database.usable()
    assert len(refusals) == 1, "it was not asked"
    while not database.usable():
        clock.advance(database.retry_in())
    assert (database.lost, told, refusals) == (False, [True], [])
    database.close()


def test_a_server_that_opens_connections_and_refuses_work_is_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A standby does so until it is promoted."""
    clock = stop_time(monkeypatch, module)
    database = Database(lambda: None)
    pauses = []
    for _ in range(3):
        with database:
            assert database.usable()
            database.mark_lost(OperationalError("read-only"))
        pauses.append(database.retry_in())
        clock.advance(database.retry_in())
    assert pauses == pytest.approx([0.0, 0.05, 0.1])
    with database:
        assert database.usable()
    database.mark_lost(OperationalError("gone"))
    assert database.retry_in() == 0, "it had done what it was asked to"
    said = [record.message.partition(":")[0] for record in caplog.records]
    assert said == ["The database is not reached", "The database is reached again.", said[0]]
    database.close()
