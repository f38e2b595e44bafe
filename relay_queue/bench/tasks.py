"""The task functions of the scratch project."""

from __future__ import annotations

import os
import time
from pathlib import Path

from relay_queue.task import task

HOLD_STEP_SECONDS = 0.02


@task
def noop() -> None:
    """Do nothing: what is left is the cost of the queue."""


@task
def moment() -> int:
    """Return the monotonic clock in nanoseconds. On Linux all processes share it."""
    return time.monotonic_ns()


@task
def hold(journal: str) -> None:
    """Write process id and time to the file, then run until a file ``<journal>.end`` exists."""
    line = f"{os.getpid()} {time.monotonic_ns()}\n"
    with Path(journal).open("a") as file:
        file.write(line)
    end = Path(f"{journal}.end")
    while not end.exists():
        time.sleep(HOLD_STEP_SECONDS)  # the bench, another process, ends it by making a file
