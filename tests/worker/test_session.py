"""The session of a worker with a real server: what it hears, and what its lock is good for."""

from __future__ import annotations

import os
import select
import selectors
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from relay_queue import wakeup
from relay_queue.query import looks
from relay_queue.store.dialects import dialect_for
from relay_queue.wakeup import Session, ring_on_commit
from relay_queue.wakeup.session import END_OLD, notify
from relay_queue.worker.threads import close_connections
from tests.conftest import wait_until
from tests.postgresql import default_is

KEY = 2**62 + 5


@pytest.fixture
def on_server(
    postgresql_url: str, django_db_setup: None, django_db_blocker: Any
) -> Iterator[psycopg.Connection[Any]]:
    """Let the default alias be on PostgreSQL; return a connection past Django."""
    with (
        django_db_blocker.unblock(),
        default_is(postgresql_url),
        psycopg.connect(postgresql_url, autocommit=True) as past_django,
    ):
        yield past_django


@pytest.fixture
def session(on_server: psycopg.Connection[Any]) -> Iterator[Session]:
    session = Session("default", KEY)
    yield session
    session.release()


def hear(session: Session) -> int:
    """Wait for a ring; return how many came, at once."""
    assert select.select([session], [], [], 30)[0]
    return session.clear()


def is_silent(session: Session) -> bool:
    return not select.select([session], [], [], 0.3)[0]


def holders(server: psycopg.Connection[Any]) -> list[int]:
    """Return the server's processes that hold the session's lock."""
    found = server.execute(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return [pid for (pid,) in found]


def test_it_hears_a_ring_of_anybody(session: Session) -> None:
    assert is_silent(session)
    notify("default")
    assert hear(session) == 1
    assert is_silent(session)


def test_calls_in_one_transaction_ring_once_and_only_when_it_commits(session: Session) -> None:
    with transaction.atomic():
        ring_on_commit("default")
        ring_on_commit("default")
        assert is_silent(session)
    assert hear(session) == 1
    with transaction.atomic():
        ring_on_commit("default")
        transaction.set_rollback(True)
    assert is_silent(session)


def test_a_ring_that_fails_hurts_nobody(session: Session) -> None:
    connection.ensure_connection()
    connection.connection.close()
    notify("default")


def test_with_polling_there_is_no_session_and_no_ring(session: Session, settings: Any) -> None:
    settings.RELAY = {"WAKEUP": "poll"}
    assert wakeup.open_session("default", KEY) is None
    wakeup.ring("default")
    ring_on_commit("default")
    assert is_silent(session)


def test_its_lock_is_held_for_its_life(
    session: Session, on_server: psycopg.Connection[Any]
) -> None:
    assert (session.held, looks.unlocked([KEY])) == (True, set())
    # Nobody is judged in the first seconds of a server.
    wait_until(lambda: looks.unlocked([KEY, KEY + 1]) == {KEY + 1})
    session.release()
    session.release()
    wait_until(lambda: looks.unlocked([KEY]) == {KEY})


def test_after_its_end_by_the_server_it_is_opened_again_and_hears_again(
    session: Session, on_server: psycopg.Connection[Any]
) -> None:
    (old,) = holders(on_server)
    on_server.execute("SELECT pg_terminate_backend(%s)", [old])
    wait_until(lambda: session.clear() == 0 and not session.held)
    assert not session.regained
    assert hear(session) == 1, "a ring may have been lost meanwhile"
    assert (session.held, session.regained) == (True, True)
    assert holders(on_server) not in ([], [old])
    notify("default")
    assert hear(session) == 1


def test_a_session_that_the_server_takes_for_alive_is_ended_by_the_next(
    session: Session, on_server: psycopg.Connection[Any]
) -> None:
    (old,) = holders(on_server)
    number = session._descriptor
    kept = os.dup(number)  # the server's end stays open, as behind a dead router
    session._selector.unregister(number)
    reading, writing = os.pipe()
    os.close(writing)
    os.dup2(reading, number)
    session._selector.register(number, selectors.EVENT_READ)
    try:
        assert session.clear() == 0
        assert not session.held
        assert hear(session) == 1
        assert holders(on_server) not in ([], [old])
    finally:
        os.close(kept)
        os.close(reading)


def test_a_session_that_is_closed_while_it_reconnects_leaves_nothing(
    on_server: psycopg.Connection[Any],
) -> None:
    session = Session("default", KEY)
    (pid,) = holders(on_server)
    on_server.execute("SELECT pg_terminate_backend(%s)", [pid])
    wait_until(lambda: session.clear() == 0 and not session.held)
    session.release()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "relay-session"])
    wait_until(lambda: holders(on_server) == [])


def test_a_transaction_that_went_past_django_is_rolled_back_between_two_functions(
    on_server: psycopg.Connection[Any],
) -> None:
    connection.ensure_connection()
    assert close_connections() == []
    connection.ensure_connection()
    connection.connection.execute("BEGIN")
    connection.connection.execute("DELETE FROM django_content_type")
    assert close_connections() == ["default"]
    (left,) = on_server.execute("SELECT count(*) FROM django_content_type").fetchone() or (0,)
    assert left


SETTINGS = (
    *("lock_timeout", "statement_timeout", "idle_session_timeout", "plan_cache_mode", "jit"),
    *("enable_seqscan", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count"),
)


def settings_of(run: Any) -> list[str]:
    """Return what a session has set; ``run`` runs a statement in it."""
    return [run(f"SHOW {name}").fetchone()[0] for name in SETTINGS]


def test_behind_a_pooler_nothing_is_set_for_the_next_client_of_the_session(
    on_server: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings_of(on_server.execute)
    # A pooler tells a number of its own, not that of the server's process.
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 1)
    dialect_for(connection).limit_wait(connection, 0.25)
    assert settings_of(connection.connection.execute) == before
    session = Session("default", KEY)
    try:
        assert session._line is not None
        assert settings_of(session._line.execute) == before
    finally:
        session.release()


@pytest.mark.parametrize("said", ["WAKEUP", "DISABLE_SERVER_SIDE_CURSORS", "pool"])
def test_where_the_settings_name_a_pooler_no_wait_is_bounded_for_all_of_the_session(
    on_server: psycopg.Connection[Any], settings: Any, said: str
) -> None:
    dialect_for(connection).limit_wait(connection, 0.25)
    assert settings_of(connection.connection.execute)[0] == "250ms", "the session is ours"
    connection.close()
    if said == "WAKEUP":
        settings.RELAY = {"WAKEUP": "poll"}
    connection.ensure_connection()
    entry = connection.settings_dict
    connection.settings_dict = {
        **entry,
        "OPTIONS": {"pool": said == "pool"},
        "DISABLE_SERVER_SIDE_CURSORS": said == "DISABLE_SERVER_SIDE_CURSORS",
    }
    try:
        dialect_for(connection).limit_wait(connection, 0.25)
        assert settings_of(connection.connection.execute)[0] == "0"
    finally:
        connection.settings_dict = entry


def test_a_session_that_a_pooler_has_lent_to_another_client_is_not_ended(
    on_server: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session("default", KEY)
    (pid,) = holders(on_server)
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 1)
    ended = [KEY, 1]
    assert session._line is not None
    with session._line.transaction():
        assert on_server.execute(END_OLD, [pid, *ended]).fetchall() == [], "it is at work"
    assert session._line.execute(END_OLD, [pid, *ended]).fetchall() == [], "it is this very one"
    assert on_server.execute(END_OLD, [pid, *ended]).fetchall() == [(True,)]
    session.release()


def test_a_pooler_in_between_is_named_in_the_log(
    on_server: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Session("default", KEY).release()
    assert "pooler" not in caplog.text
    # A pooler tells a number of its own, not that of the server's process.
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 1)
    Session("default", KEY).release()
    assert 'set RELAY["WAKEUP"] to "poll"' in caplog.text
