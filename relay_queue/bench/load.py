"""Four workers with sixteen slots each and more to do than they can: speed, shares, neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from relay_queue.bench import scratch
from relay_queue.bench.baseline import Bare, ungated_fairness
from relay_queue.bench.figures import Figure, judge
from relay_queue.bench.measuring import BenchError, cpu_seconds, percentile, timed, wait_for
from relay_queue.bench.neighbour import write_while
from relay_queue.bench.run import Run
from relay_queue.models import Lease
from relay_queue.states import State

PROCESSES = 4
CONCURRENCY = 16
# The first and the last jobs are left out: at the start workers feel their way up to full claims,
# at the end there is not enough left for all of them.
TRIMMED_SHARE = 0.1


def measure(run: Run) -> Iterator[Figure]:
    """Measure what is asked for of ``lease_ack_4x16``, ``fair_share``, ``other_writer_p99``."""
    if run.wants("lease_ack_4x16", "fair_share"):
        yield from _speed_and_shares(run)
    if run.wants("other_writer_p99"):
        yield _other_writer(run)


def steady(times: list[datetime]) -> tuple[datetime, datetime, float]:
    """Return the window in which the middle of all acks happened, and the acks a second in it."""
    trim = int(len(times) * TRIMMED_SHARE)
    first, last = times[trim], times[-trim - 1]
    seconds = (last - first).total_seconds()
    if seconds <= 0:
        raise BenchError(f"{len(times)} jobs are too few to measure a rate")
    return first, last, sum(first < moment <= last for moment in times) / seconds


def _speed_and_shares(run: Run) -> Iterator[Figure]:
    database = run.folder / "load.sqlite3"
    scratch.use(database)
    jobs = run.size(200_000, 20_000)
    cpu = run_all(run, jobs)
    times = scratch.acked_since(0)
    if len(times) != jobs:
        raise BenchError(f"{jobs:,} jobs were enqueued and {len(times):,} leases were acked")
    first, last, rate = steady(times)
    with Bare.like(run.folder / "bare.sqlite3", database) as bare:
        if run.wants("lease_ack_4x16"):
            run.say("the same row changes with bare sqlite3")
            yield judge(
                "lease_ack_4x16",
                rate,
                baseline=bare.rate(run.size(40_000, 4_000), CONCURRENCY),
                baseline_is=f"bare sqlite3, one process, {CONCURRENCY} jobs a commit",
                jobs=jobs,
                cpu_us_per_job=round(cpu / jobs * 1e6, 1),
                window_seconds=(last - first).total_seconds(),
                jobs_per_commit=round(jobs / len(set(times)), 1),
            )
    if run.wants("fair_share"):
        run.say("bare sqlite3 writers without a gate")
        shares = _shares(first, last)
        yield judge(
            "fair_share",
            min(shares) / max(shares),
            baseline=ungated_fairness(
                run.folder / "bare.sqlite3", PROCESSES, run.size(5.0, 1.0), CONCURRENCY
            ),
            baseline_is=f"{PROCESSES} bare sqlite3 writers on SQLite's own lock",
            shares=shares,
        )


def run_all(run: Run, jobs: int) -> float:
    """Run no-op jobs in all workers; return the processor seconds that the workers used."""
    with scratch.Fleet(PROCESSES, CONCURRENCY) as fleet:
        with scratch.paused():
            run.say(f"enqueueing {jobs:,} jobs")
            scratch.enqueue(jobs)
            before = _cpu(fleet)
            run.say(f"running {jobs:,} jobs in {PROCESSES} workers of {CONCURRENCY} slots")
        scratch.wait_finished(fleet)
        return _cpu(fleet) - before


def _cpu(fleet: scratch.Fleet) -> float:
    return sum(map(cpu_seconds, fleet.pids()))


def _shares(first: datetime, last: datetime) -> list[int]:
    """Return how many leases each worker was granted in a window."""
    granted = Lease.objects.filter(acquired_at__gt=first, acquired_at__lte=last)
    counts = Counter(granted.values_list("worker_id", flat=True))
    return sorted([*counts.values(), *[0] * (PROCESSES - len(counts))])


def _other_writer(run: Run) -> Figure:
    database = run.folder / "neighbour.sqlite3"
    scratch.use(database)
    jobs = run.size(150_000, 12_000)
    with scratch.Fleet(PROCESSES, CONCURRENCY) as fleet:
        with scratch.paused():
            run.say(f"enqueueing {jobs:,} jobs")
            scratch.enqueue(jobs)
        run.say("writing beside the busy workers")
        wait_for("the first finished job", lambda: scratch.count(State.SUCCEEDED), seconds=60)
        writes = write_while(lambda: scratch.count(State.READY) > jobs * TRIMMED_SHARE)
        scratch.wait_finished(fleet)
    with Bare.like(run.folder / "alone.sqlite3", database) as bare:
        alone = [timed(bare.insert) * 1000 for _ in range(run.size(500, 150))]
    milliseconds = [write for write in writes if write is not None]
    locked = len(writes) - len(milliseconds)
    return judge(
        "other_writer_p99",
        percentile(milliseconds, 99),
        baseline=percentile(alone, 99),
        baseline_is="a bare sqlite3 insert with no worker about",
        fault=f"{locked} writes were refused: database is locked" if locked else "",
        samples=len(writes),
        p50_ms=round(percentile(milliseconds, 50), 3),
        max_ms=round(max(milliseconds), 3),
        locked=locked,
    )
