"""What a worker costs: processor time when it is idle, memory when it is busy."""

from __future__ import annotations

import os
import pty
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from select import select

from relay_queue.bench import scratch
from relay_queue.bench.figures import Figure, judge
from relay_queue.bench.filling import fill
from relay_queue.bench.measuring import (
    BenchError,
    cpu_seconds,
    proportional_mib,
    resident_mib,
    wait_for,
)
from relay_queue.bench.run import Run
from relay_queue.states import State

SETTLE_SECONDS = 2.0
SHELL_SECONDS = 60.0
SLOTS = 64
WARM_UP_JOBS = 10_000
# More than this between the first jobs and the last is a leak, not the noise of an allocator.
GROWTH_MIB = 2.0
PROMPT = b">>> "


def measure(run: Run) -> Iterator[Figure]:
    """Measure what is asked for of ``idle_cpu`` and ``worker_rss``."""
    if run.wants("idle_cpu"):
        yield _idle_cpu(run)
    if run.wants("worker_rss"):
        yield _memory(run)


def _idle_cpu(run: Run) -> Figure:
    scratch.use(run.folder / "idle.sqlite3")
    seconds = run.size(30.0, 4.0)
    with scratch.Fleet(1, 8) as fleet:
        scratch.enqueue(100)  # a worker that has worked, not one that never started a thread
        scratch.wait_finished(fleet)
        time.sleep(SETTLE_SECONDS)  # the last statistics are written up to a second later
        run.say(f"watching an idle worker for {seconds:g} s")
        (pid,) = fleet.pids()
        began, before = time.monotonic(), cpu_seconds(pid)
        time.sleep(seconds)  # the stretch over which the processor's time is counted
        share = (cpu_seconds(pid) - before) / (time.monotonic() - began)
    return judge("idle_cpu", share * 100, seconds=seconds)


def _memory(run: Run) -> Figure:
    jobs = run.size(1_000_000, 20_000)
    database = run.folder / "memory.sqlite3"
    scratch.use(database)
    run.say(f"filling a database with {jobs:,} jobs")
    fill(database, ready=jobs)
    with _idle_shell() as shell:
        shell_rss, shell_pss = resident_mib(shell), proportional_mib(shell)
    with scratch.Fleet(1, SLOTS) as fleet:
        run.say(f"running {jobs:,} jobs in one worker of {SLOTS} slots")
        (pid,) = fleet.pids()
        wait_for(
            f"the first {WARM_UP_JOBS:,} jobs",
            lambda: scratch.count(State.SUCCEEDED) >= WARM_UP_JOBS,
            seconds=scratch.STALL_SECONDS,
        )
        warm = resident_mib(pid)
        scratch.wait_finished(fleet)
        rss, pss = resident_mib(pid), proportional_mib(pid)
    growth = rss - warm
    return judge(
        "worker_rss",
        rss - shell_rss,
        fault=f"it grew by {growth:.1f} MiB over {jobs:,} jobs" if growth > GROWTH_MIB else "",
        jobs=jobs,
        worker_rss_mib=round(rss, 1),
        shell_rss_mib=round(shell_rss, 1),
        worker_pss_mib=round(pss, 1),
        shell_pss_mib=round(shell_pss, 1),
        growth_mib=round(growth, 2),
    )


@contextmanager
def _idle_shell() -> Iterator[int]:
    """Run ``manage.py shell`` at its prompt, on a terminal of its own; yield its process id."""
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        scratch.django_command("shell", "--interface", "python"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        _read_until_prompt(ours)
        yield shell.pid
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


def _read_until_prompt(terminal: int) -> None:
    seen = b""
    deadline = time.monotonic() + SHELL_SECONDS
    while PROMPT not in seen:
        if not select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise BenchError(f"manage.py shell showed no prompt within {SHELL_SECONDS:g} s")
        seen += os.read(terminal, 4096)
