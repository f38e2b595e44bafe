"""A child that outlives its parent keeps nothing of it alive on a server."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing

import psycopg

from relay_queue.db.inherited import keep_from_children
from tests.conftest import wait_until

KEY = 4711


def fork_and_die(address: str) -> int:
    """Run a process that dies in a transaction and leaves a child; return the child's id."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        line = psycopg.connect(address)
        keep_from_children(line)
        line.execute("SELECT pg_advisory_xact_lock(%s)", [KEY])
        if not (child := os.fork()):
            signal.pause()
        os.write(writer, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(os.read(reader, 16))
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    return child


def is_free(line: psycopg.Connection[tuple[bool]]) -> bool:
    row = line.execute("SELECT pg_try_advisory_xact_lock(%s)", [KEY]).fetchone()
    assert row is not None
    return row[0]


def test_a_transaction_ends_with_its_process_although_a_child_of_that_lives(
    postgresql_url: str,
) -> None:
    child = fork_and_die(postgresql_url)
    try:
        with psycopg.connect(postgresql_url, autocommit=True) as line:
            wait_until(lambda: is_free(line))
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_takes_its_leave_does_not_end_its_parents_session(
    postgresql_url: str,
) -> None:
    with psycopg.connect(postgresql_url, autocommit=True) as line:
        keep_from_children(line)
        if not (pid := os.fork()):
            line.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert line.execute("SELECT 1").fetchone() == (1,)


def test_a_socket_of_the_parent_is_open_in_the_child_and_leads_nowhere() -> None:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        keep_from_children(theirs)
        if not (pid := os.fork()):
            sent = os.write(theirs.fileno(), b"lost")
            os._exit(sent)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == len(b"lost")
        ours.setblocking(False)
        theirs.send(b"kept")
        assert ours.recv(16) == b"kept"
