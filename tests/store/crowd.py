"""A crowd of processes that race on one database.

Sixteen processes that each import Django take many times as long as the race that they are for.
So one process does that once, and the racers of every race are forked from it: it has opened no
connection and holds no gate, so each racer is as much on its own as if it had been started alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from threading import Barrier
from typing import Any

from tests.conftest import ROOT, STOP_SECONDS

MEETING_SECONDS = 60.0

Call = tuple[str, Sequence[Any]]
"""The name of a function of `tests.store.racers`, and its arguments."""


class Crowd:
    """Where a test asks for races; ``close`` ends the process that forks the racers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.crowd"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def race(self, database: dict[str, Any], calls: Sequence[Call]) -> list[Any]:
        """Make each call in a process of its own, all at the same time; return what they return.

        ``database`` is an entry of ``DATABASES``.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([database, calls], default=str) + "\n")
        self._process.stdin.flush()
        answers, failure = json.loads(self._process.stdout.readline())
        assert not failure, failure
        return list(answers)

    def close(self) -> None:
        """End the process, and those of a race that did not end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(STOP_SECONDS) == 0
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


def _race(database: dict[str, Any], calls: Sequence[Call]) -> list[Any]:
    fork = get_context("fork")
    barrier = fork.Barrier(len(calls))
    with ProcessPoolExecutor(
        len(calls), mp_context=fork, initializer=_prepare, initargs=(database, barrier)
    ) as racers:
        # Nobody passes the barrier before all are there, so each process gets one call.
        return list(racers.map(_run, calls))


def _prepare(database: dict[str, Any], barrier: Barrier) -> None:
    """Point this process at the database of the race."""
    from django.db import connections

    del connections["default"]  # which was made, not opened, when Django was set up
    connections.settings["default"].update(database)
    _run.barrier = barrier  # type: ignore[attr-defined]


def _run(call: Call) -> Any:
    from relay_queue.query import looks
    from tests.store import racers

    name, arguments = call
    looks.read_queues()  # connects
    _run.barrier.wait(MEETING_SECONDS)  # type: ignore[attr-defined]
    return getattr(racers, name)(*arguments)


def main() -> None:
    """Hold a race for each line of the input, and print its answers or its failure."""
    import django

    django.setup()
    for line in sys.stdin:
        try:
            answer: tuple[Any, str] = (_race(*json.loads(line)), "")
        except Exception:
            answer = (None, traceback.format_exc())
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
