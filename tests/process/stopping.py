"""Workers that are told to stop at one exact point of their life: ``python -m tests.process.stopping``.

The argument is a JSON list of ``[queue, point, directory]``. One process is set up and forked for
each: a supervisor of its own session with one worker, which serves that queue. When it first comes
to the point, SIGTERM goes to its whole group, as from an init system. Prints the exit codes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast, get_args

import django

from relay_queue.worker.plan import HOOKS, Point

FUNCTIONS = (
    "supervisor.fork_child",
    "processes.become_worker",
    "main._join",
    "main.register",
    "loop.Loop.run",
    "pacing.QueueWatch._full_check",
    "loop.Loop._probe",
    "loop.Loop._apply",
    "loop.Loop._start",
    "slots.Slots.start",
    "slots.begin",
    "slots.conclude",
    "loop.Loop._apply_answers",
)
"""Functions of a worker, in the order in which a worker and its first job come to them."""

NEVER_LEFT = frozenset({"loop.Loop.run after", "supervisor.fork_child after"})

POINTS = (
    *(f"tick {point}" for point in get_args(Point)),
    *(
        point
        for name in FUNCTIONS
        for point in (f"{name} before", f"{name} after")
        if point not in NEVER_LEFT
    ),
)
"""All points: those at which a tick has hooks, and the moments before and after a function."""


def signal_at(point: str, marker: str) -> None:
    """Send SIGTERM to the group of this process when it first comes to a point."""

    def once(_: Any = None) -> None:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.killpg(0, signal.SIGTERM)

    name, _, when = point.partition(" ")
    if name == "tick":
        HOOKS[cast(Point, when)] = once
    else:
        signal_around(name, when, once)


def signal_around(name: str, when: str, once: Callable[[], None]) -> None:
    """Call ``once`` before or after each call of a function."""
    module, *path, attribute = name.split(".")
    owner: Any = import_module(f"relay_queue.worker.{module}")
    for part in path:
        owner = getattr(owner, part)
    called: Callable[..., Any] = getattr(owner, attribute)

    def signalling(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            once()
        try:
            return called(*args, **kwargs)
        finally:
            if when == "after":
                once()

    setattr(owner, attribute, signalling)


def live(queue: str, point: str, directory: str) -> None:
    """Be the supervisor of one worker that is told to stop at a point."""
    from django.core.management import execute_from_command_line

    os.setsid()
    signal_at(point, os.path.join(directory, f"told {point}"))
    execute_from_command_line(
        ["manage.py", "runworker", f"--queue={queue}", "--concurrency=2", "--verbosity=0"]
    )


def main(wanted: str) -> None:
    """Fork a supervisor for each point, and print with which code each of them ended."""
    django.setup()
    import_module("relay_queue.worker.main")
    children = {}
    for queue, point, directory in json.loads(wanted):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                live(queue, point, directory)
                code = 0
            except SystemExit as leave:
                code = int(leave.code or 0)
            finally:
                os._exit(code)
        children[pid] = point
    print(
        json.dumps(
            {children[pid]: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
