"""One worker with one slot: nothing to batch, so the number of commits is what counts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from relay_queue.bench import scratch
from relay_queue.bench.baseline import Bare
from relay_queue.bench.figures import Figure, judge
from relay_queue.bench.measuring import cpu_seconds
from relay_queue.bench.run import Run

ROUNDS = 5


def measure(run: Run) -> Iterator[Figure]:
    """Measure ``lease_ack_1x1``.

    The worker and the bare loop take turns, so that a slow minute of the disk hits both. A round of
    the worker is timed from its first ack to its last.
    """
    database = run.folder / "single.sqlite3"
    scratch.use(database)
    scratch.enqueue(1)  # the model of the bare rows
    jobs = run.size(1_000, 100)
    ours = theirs = 0.0
    commits = 0
    with (
        scratch.Fleet(1, 1) as fleet,
        Bare.like(run.folder / "bare.sqlite3", database) as bare,
    ):
        scratch.wait_finished(fleet)
        before = cpu_seconds(fleet.pids()[0])
        for number in range(ROUNDS):
            run.say(f"round {number + 1} of {ROUNDS}: {jobs:,} jobs each")
            theirs += bare.two_commit_seconds(jobs)
            times = _acks(fleet, jobs)
            ours += (times[-1] - times[0]).total_seconds() * jobs / (jobs - 1)
            commits += len(set(times))
        cpu = cpu_seconds(fleet.pids()[0]) - before
    yield judge(
        "lease_ack_1x1",
        ROUNDS * jobs / ours,
        baseline=ROUNDS * jobs / theirs,
        baseline_is="bare sqlite3, a commit for the claim and a commit for the ack",
        jobs=ROUNDS * jobs,
        commits_with_an_ack=commits,
        cpu_us_per_job=round(cpu / (ROUNDS * jobs) * 1e6, 1),
    )


def _acks(fleet: scratch.Fleet, jobs: int) -> list[datetime]:
    """Run jobs and return when each was acked."""
    last = scratch.last_lease()
    with scratch.paused():
        scratch.enqueue(jobs)
    scratch.wait_finished(fleet)
    return scratch.acked_since(last)
