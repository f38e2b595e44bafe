"""Workers whose process was prepared before they start: ``python -m tests.process.driver``.

The first argument names a function below, the second is what it gets; the rest is the command line
of ``manage.py``. What is put in place before the fork is in place in every worker.
"""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import os
import queue
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import django
from django.db import OperationalError, connection

from relay_queue.lab.faults import die_after_claim, die_after_settle, jump_clock
from relay_queue.worker.plan import HOOKS

if TYPE_CHECKING:
    from relay_queue.worker.plan import Done

SUPERVISOR = os.getpid()
FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def freeze_in_claim(path: str) -> None:
    """Be stopped in the tick's transaction, with the writer in hand, while a file exists."""

    def freeze(done: Done) -> None:
        if done.claims and os.path.exists(path):
            os.unlink(path)
            os.kill(os.getpid(), signal.SIGSTOP)

    HOOKS["claimed"] = freeze


def deny_threads(path: str) -> None:
    """Let the system give no thread for a slot or for coroutines, while a file exists."""
    import threading

    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("relay-slot") and os.path.exists(path):
            raise RuntimeError("can't start new thread")
        begin(thread)

    threading.Thread.start = start


def break_commit(path: str) -> None:
    """Let the commit of a tick with outcomes end in an I/O error, once a file exists.

    The commit itself is done: the worker must not believe that it was not.
    """

    def break_it(done: Done) -> None:
        if done.settlements and os.path.exists(path):
            os.unlink(path)
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise OperationalError("disk I/O error") from error

    HOOKS["committed"] = break_it


def lock_reads(path: str) -> None:
    """Let the look of a loop find the database locked, while a file exists.

    SQLite does so to readers while another process recovers the log after a crash.
    """
    from relay_queue.query import looks

    look = looks.read_queues

    def locked() -> Any:
        if os.path.exists(path):
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
            raise OperationalError("database is locked") from error
        return look()

    looks.read_queues = locked


def hang_in_boot(path: str) -> None:
    """Let a worker never come to its end of joining, while a file exists."""
    from relay_queue.worker import main

    join = main._join

    def hanging(*arguments: Any) -> Any:
        while os.path.exists(path):
            time.sleep(0.05)
        return join(*arguments)

    main._join = hanging


def lose_commit(path: str) -> None:
    """Lose the connection at the commit of a tick, once a file exists; the commit itself is done.

    The file is named after what the tick must have: ``settlements`` or ``claims``.
    """

    def lose(done: Done) -> None:
        if getattr(done, os.path.basename(path)) and os.path.exists(path):
            os.unlink(path)
            connection.close()
            raise OperationalError("the connection was lost while committing")

    HOOKS["committed"] = lose


def report(path: str) -> None:
    """Set up, before the fork, what projects have beside their jobs; it writes lines to a file.

    Each line carries its process: records of the logger ``shop`` by way of a listener's thread,
    exit handlers, and receivers of the signals of a process.
    """
    from relay_queue.signals import worker_process_started, worker_process_stopping

    class Sender(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(path, record.getMessage())

    records: queue.Queue[Any] = queue.Queue()
    listener = logging.handlers.QueueListener(records, Sender())
    listener.start()
    logging.getLogger("shop").addHandler(logging.handlers.QueueHandler(records))
    atexit.register(say, path, "exit")
    atexit.register(listener.stop)
    worker_process_started.connect(
        lambda name, **_: say(path, f"started {name}"), weak=False, dispatch_uid="started"
    )
    worker_process_stopping.connect(
        lambda name, exit_code, **_: say(path, f"stopping {name} {exit_code}"), weak=False
    )


def report_and_get_stuck(path: str) -> None:
    """As `report`, and with an exit handler that does not end, which comes after the others."""
    atexit.register(stick)
    report(path)


def stick() -> None:
    """Never return in a worker, which has a supervisor for its parent."""
    if os.getpid() != SUPERVISOR:
        time.sleep(3600)


def send_from_a_thread(path: str) -> None:
    """Start a thread before the fork that no worker will have."""
    threading.Thread(target=threading.Event().wait, name="sender of reports", daemon=True).start()


def keep_folder(path: str) -> None:
    """Make a folder that goes with this process, and note where it is."""
    FOLDERS.append(tempfile.TemporaryDirectory())
    say(path, FOLDERS[0].name)


def say(path: str, text: str) -> None:
    """Append a line with the id of this process, in one write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{os.getpid()} {text}\n".encode())
    os.close(descriptor)


def live_elsewhere(name: str) -> None:
    """Be another machine, as far as Relay can tell."""
    import socket

    from relay_queue.worker import identity

    socket.gethostname = lambda: name
    identity.boot_id = lambda: f"boot of {name}"


PREPARATIONS: dict[str, Callable[[str], None]] = {
    function.__name__: function
    for function in (
        jump_clock,
        die_after_claim,
        die_after_settle,
        freeze_in_claim,
        break_commit,
        deny_threads,
        lock_reads,
        hang_in_boot,
        lose_commit,
        live_elsewhere,
        report,
        report_and_get_stuck,
        send_from_a_thread,
        keep_folder,
    )
}


def main(name: str, argument: str, *command: str) -> None:
    """Prepare this process, then run a management command in it."""
    django.setup()
    PREPARATIONS[name](argument)
    from django.core.management import execute_from_command_line

    execute_from_command_line(["manage.py", *command])


if __name__ == "__main__":
    main(*sys.argv[1:])
