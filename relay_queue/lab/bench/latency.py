"""How soon a job runs: by an idle worker, and after its worker was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Final

from relay_queue.lab.bench.bare import Bare
from relay_queue.lab.bench.figures import Figure, judge, percentile
from relay_queue.lab.bench.workload import BenchProject, Run
from relay_queue.lab.processes import is_alive
from relay_queue.lab.project import Workers
from relay_queue.lab.tasks import moment, wait
from relay_queue.models import Job

CONCURRENCY: Final = 8
WARM_UP: Final = 5
RECOVERY_SECONDS: Final = 90.0


def pickup(run: Run) -> Iterator[Figure]:
    """Measure what is asked for of ``pickup_p50`` and ``pickup_p99``.

    From the return of ``enqueue`` to the first line of the function in another process, by the
    monotonic clock that both share. The worker has come to rest before each job.
    """
    project = run.on_file("latency")
    picked_up = _pick_ups(run, project)
    with Bare.like(run.folder / "bare.sqlite3", project.file) as bare:
        claims = [seconds * 1000 for seconds in bare.claim_seconds(run.size(500, 100))]
    for name, percent in (("pickup_p50", 50), ("pickup_p99", 99)):
        if run.wants(name):
            yield judge(
                name,
                percentile(picked_up, percent),
                baseline=percentile(claims, percent),
                baseline_is="bare sqlite3, one claim with its commit, which pickup includes",
                samples=len(picked_up),
                min_ms=round(min(picked_up), 3),
                max_ms=round(max(picked_up), 3),
            )


def pickup_on_server(run: Run) -> Iterator[Figure]:
    """Measure ``pg_pickup_p50`` in the same way."""
    if not run.wants("pg_pickup_p50"):
        return
    with run.on_server() as project:
        picked_up = _pick_ups(run, project)
    yield judge(
        "pg_pickup_p50",
        percentile(picked_up, 50),
        samples=len(picked_up),
        p99_ms=round(percentile(picked_up, 99), 3),
        max_ms=round(max(picked_up), 3),
    )


def _pick_ups(run: Run, project: BenchProject) -> list[float]:
    """Return the milliseconds from enqueue to entry of each sample."""
    samples = run.size(500, 300)
    returned: dict[int, int] = {}
    with project.work(concurrency=CONCURRENCY) as workers:
        run.say(f"enqueueing {samples:,} jobs, one at a time, for an idle worker")
        for _ in range(WARM_UP + samples):
            job_id = int(moment.enqueue().id)
            returned[job_id] = time.monotonic_ns()
            project.wait_finished(workers, pause=0.01)
            # The worker must have gone back to sleep: an idle one is measured.
            time.sleep(run.size(0.03, 0.01))
    entered = Job.objects.filter(id__in=returned).order_by("id").values_list("id", "result")
    taken = [(json.loads(result or "0") - returned[job_id]) / 1e6 for job_id, result in entered]
    return taken[WARM_UP:]


def recovery(run: Run) -> Iterator[Figure]:
    """Measure ``kill_recovery_p50``: from SIGKILL to the function being entered elsewhere."""
    project = run.on_file("recovery")
    samples = run.size(11, 7)
    with project.work(processes=2) as workers:
        run.say(f"killing a worker {samples} times")
        taken = [_kill_one(project, workers, f"end-{n}") for n in range(samples)]
    yield judge(
        "kill_recovery_p50",
        percentile(taken, 50),
        samples=samples,
        min_s=round(min(taken), 3),
        max_s=round(max(taken), 3),
    )


def _kill_one(project: BenchProject, workers: Workers, end: str) -> float:
    """Kill the worker that runs a job; return the seconds until another one runs it."""
    project.wait(
        "a full set of workers",
        lambda: len([pid for pid in project.pids() if is_alive(pid)]) == 2,
        seconds=RECOVERY_SECONDS,
    )
    job = project.enqueue(wait, end)
    pid = project.wait_run(job, seconds=RECOVERY_SECONDS).pid
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    again = project.wait_run(job, attempt=2, seconds=RECOVERY_SECONDS)
    project.make(end)
    project.wait_finished(workers)
    return again.at - killed
