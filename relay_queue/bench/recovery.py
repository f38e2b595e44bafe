"""How soon the job of a killed worker runs again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from relay_queue.bench import scratch
from relay_queue.bench.figures import Figure, judge
from relay_queue.bench.measuring import percentile, wait_for
from relay_queue.bench.run import Run
from relay_queue.bench.tasks import hold

WAIT_SECONDS = 90.0


def measure(run: Run) -> Iterator[Figure]:
    """Measure ``kill_recovery_p50``: from SIGKILL to the function being entered elsewhere."""
    scratch.use(run.folder / "recovery.sqlite3")
    samples = run.size(11, 7)
    with scratch.Fleet(2, 4) as fleet:
        run.say(f"killing a worker {samples} times")
        taken = [_kill_one(fleet, run.folder / f"journal-{n}") for n in range(samples)]
    yield judge(
        "kill_recovery_p50",
        percentile(taken, 50),
        samples=samples,
        min_s=round(min(taken), 3),
        max_s=round(max(taken), 3),
    )


def _kill_one(fleet: scratch.Fleet, journal: Path) -> float:
    """Kill the worker that runs a job; return the seconds until another one runs it."""
    wait_for("a full set of workers", lambda: len(_alive(fleet)) == 2, seconds=WAIT_SECONDS)
    hold.enqueue(str(journal))
    pid, _ = wait_for(
        "the first start of the job", lambda: _entry(journal, 0), seconds=WAIT_SECONDS
    )
    killed = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    _, again = wait_for("the second start", lambda: _entry(journal, 1), seconds=WAIT_SECONDS)
    Path(f"{journal}.end").touch()
    scratch.wait_finished(fleet)
    return (again - killed) / 1e9


def _entry(journal: Path, number: int) -> tuple[int, int] | None:
    """Return process id and time of one start of the function, once it is in the journal."""
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    if len(lines) <= number or not lines[number].endswith("\n"):
        return None
    pid, moment = lines[number].split()
    return int(pid), int(moment)


def _alive(fleet: scratch.Fleet) -> list[int]:
    """Return the workers that are registered and whose process is there."""
    return [pid for pid in fleet.pids() if Path(f"/proc/{pid}").exists()]
