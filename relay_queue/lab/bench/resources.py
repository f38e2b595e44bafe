"""What a worker costs: processor time when it is idle, memory when it is busy."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from select import select
from typing import Final

from relay_queue.lab.bench.figures import Figure, judge
from relay_queue.lab.bench.workload import STALL_SECONDS, Run, count, cpu_seconds, seen
from relay_queue.lab.processes import LabError, proportional_mib, resident_mib
from relay_queue.lab.project import DJANGO
from relay_queue.states import State

SETTLE_SECONDS: Final = 2.0
SHELL_SECONDS: Final = 60.0
SLOTS: Final = 64
WARM_UP_JOBS: Final = 10_000
GROWTH_MIB: Final = 2.0
"""More than this between the first jobs and the last is a leak, not the noise of an allocator."""

PROMPT: Final = b">>> "


def idle_cpu(run: Run) -> Iterator[Figure]:
    """Measure ``idle_cpu``, if it is asked for."""
    if not run.wants("idle_cpu"):
        return
    project = run.on_file("idle")
    seconds = run.size(30.0, 4.0)
    with project.work(concurrency=8) as workers:
        project.enqueue_noops(100)  # a worker that has worked, not one that never started a thread
        project.wait_finished(workers)
        time.sleep(SETTLE_SECONDS)  # the last statistics are written up to a second later
        run.say(f"watching an idle worker for {seconds:g} s")
        began, before = time.monotonic(), cpu_seconds(project.pids())
        time.sleep(seconds)  # the stretch over which the processor's time is counted
        share = (cpu_seconds(project.pids()) - before) / (time.monotonic() - began)
    yield judge("idle_cpu", share * 100, seconds=seconds)


def memory(run: Run) -> Iterator[Figure]:
    """Measure ``worker_rss``, if it is asked for."""
    if not run.wants("worker_rss"):
        return
    jobs = run.size(1_000_000, 20_000)
    project = run.on_file("memory")
    run.say(f"filling a database with {jobs:,} jobs")
    project.fill(ready=jobs)
    with _idle_shell() as shell:
        shell_rss, shell_pss = _memory(shell)
    with project.work(concurrency=SLOTS) as workers:
        run.say(f"running {jobs:,} jobs in one worker of {SLOTS} slots")
        (pid,) = project.pids()
        project.wait(
            f"the first {WARM_UP_JOBS:,} jobs",
            lambda: count(State.SUCCEEDED) >= WARM_UP_JOBS,
            seconds=STALL_SECONDS,
        )
        warm, _ = _memory(pid)
        project.wait_finished(workers)
        rss, pss = _memory(pid)
    growth = rss - warm
    yield judge(
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


def _memory(pid: int) -> tuple[float, float]:
    """Return the resident and the proportional memory of a process, in MiB."""
    return seen(resident_mib(pid)), seen(proportional_mib(pid))


@contextmanager
def _idle_shell() -> Iterator[int]:
    """Run ``manage.py shell`` at its prompt, on a terminal of its own; yield its process id."""
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        [sys.executable, *DJANGO, "shell", "--interface", "python"],
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
            raise LabError(f"manage.py shell showed no prompt within {SHELL_SECONDS:g} s")
        seen += os.read(terminal, 4096)
