"""How fast the public API puts jobs into the table: one a commit, and many."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import process_time

from relay_queue.bench import scratch
from relay_queue.bench.baseline import Bare
from relay_queue.bench.figures import Figure, judge
from relay_queue.bench.measuring import timed
from relay_queue.bench.run import Run
from relay_queue.bench.tasks import noop

ROUNDS = 5


def measure(run: Run) -> Iterator[Figure]:
    """Measure what is asked for of ``enqueue_one`` and ``enqueue_bulk``. No worker runs."""
    database = run.folder / "enqueue.sqlite3"
    scratch.use(database)
    scratch.enqueue(1)  # makes the queue, and is the model of the bare rows
    with Bare.like(run.folder / "bare.sqlite3", database) as bare:
        if run.wants("enqueue_one"):
            yield _one(run, bare)
        if run.wants("enqueue_bulk"):
            yield _bulk(run, bare)


def _one(run: Run, bare: Bare) -> Figure:
    jobs = run.size(400, 80)
    run.say(f"enqueueing {ROUNDS * jobs:,} jobs one by one")
    ours: list[float] = []
    theirs: list[float] = []
    used = 0.0
    # In turns, so that a slow moment of the disk hits both.
    for _ in range(ROUNDS):
        theirs += [timed(bare.insert) for _ in range(jobs)]
        before = process_time()
        ours += [timed(noop.enqueue) for _ in range(jobs)]
        used += process_time() - before
    return judge(
        "enqueue_one",
        len(ours) / sum(ours),
        baseline=len(theirs) / sum(theirs),
        baseline_is="bare sqlite3, insert and commit of a like row",
        cpu_us_per_job=round(used / len(ours) * 1e6, 1),
        p50_us=round(median(ours) * 1e6),
        bare_p50_us=round(median(theirs) * 1e6),
        p50_ratio=round(median(theirs) / median(ours), 3),
    )


def _bulk(run: Run, bare: Bare) -> Figure:
    jobs = run.size(40_000, 5_000)
    run.say(f"enqueueing {ROUNDS * jobs:,} jobs, many a commit")
    ours: list[float] = []
    theirs: list[float] = []
    used = 0.0
    for _ in range(ROUNDS):
        theirs.append(timed(lambda: bare.insert(jobs)))
        before = process_time()
        ours.append(timed(lambda: scratch.enqueue(jobs)))
        used += process_time() - before
    return judge(
        "enqueue_bulk",
        jobs / median(ours),
        baseline=jobs / median(theirs),
        baseline_is="bare sqlite3, executemany of like rows",
        cpu_us_per_job=round(used / (ROUNDS * jobs) * 1e6, 1),
        jobs_per_commit=min(jobs, scratch.BATCH),
    )
