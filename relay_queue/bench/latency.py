"""How soon an idle worker runs a job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from relay_queue.bench import scratch
from relay_queue.bench.baseline import Bare
from relay_queue.bench.figures import Figure, judge
from relay_queue.bench.measuring import percentile
from relay_queue.bench.run import Run
from relay_queue.bench.tasks import moment
from relay_queue.models import Job

CONCURRENCY = 8
WARM_UP = 5


def measure(run: Run) -> Iterator[Figure]:
    """Measure what is asked for of ``pickup_p50`` and ``pickup_p99``.

    From the return of ``enqueue`` to the first line of the function in another process, by the
    monotonic clock that both share. The worker has come to rest before each job.
    """
    database = run.folder / "latency.sqlite3"
    scratch.use(database)
    with scratch.Fleet(1, CONCURRENCY) as fleet:
        samples = run.size(500, 300)
        run.say(f"enqueueing {samples:,} jobs, one at a time, for an idle worker")
        picked_up = pick_ups(fleet, samples, run.size(0.03, 0.01))
    with Bare.like(run.folder / "bare.sqlite3", database) as bare:
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


def pick_ups(fleet: scratch.Fleet, samples: int, gap_seconds: float) -> list[float]:
    """Return the milliseconds from enqueue to entry of each sample."""
    returned: dict[int, int] = {}
    for _ in range(WARM_UP + samples):
        job_id = int(moment.enqueue().id)
        returned[job_id] = time.monotonic_ns()
        scratch.wait_finished(fleet, pause=0.01)
        time.sleep(gap_seconds)  # the worker must have gone back to sleep: an idle one is measured
    entered = Job.objects.filter(id__in=returned).order_by("id").values_list("id", "result")
    taken = [(json.loads(result or "0") - returned[job_id]) / 1e6 for job_id, result in entered]
    return taken[WARM_UP:]
