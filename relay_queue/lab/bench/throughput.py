"""How many jobs a second: enqueued, claimed and acked, by many workers, by one, and in huge tables.

Relay and its baseline take turns where that is possible, so that a slow minute of the disk hits both.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from statistics import median
from typing import Any, Final
from uuid import uuid4

from django.db import OperationalError, connection

from relay_queue import store
from relay_queue.lab.bench.bare import Bare, one_by_one, ungated_fairness
from relay_queue.lab.bench.figures import Figure, judge, percentile, timed
from relay_queue.lab.bench.workload import (
    BATCH,
    QUEUE,
    BenchProject,
    Run,
    acked_since,
    count,
    cpu_seconds,
    server_address,
)
from relay_queue.lab.processes import LabError
from relay_queue.lab.tasks import noop, write_a_session
from relay_queue.models import Job, Lease
from relay_queue.states import State
from relay_queue.store.records import Claim, Settlement

PROCESSES: Final = 4
CONCURRENCY: Final = 16
CLAIM_BATCH: Final = 64
CLAIM_ROUNDS: Final = 8
ROUNDS: Final = 5
WRITE_PAUSE_SECONDS: Final = 0.005

TRIMMED_SHARE: Final = 0.1
"""Of the jobs, at either end, which no rate counts. At the start workers raise the size of their
claims step by step, and at the end too few jobs are left for all of them."""

DEAD_ROWS: Final = """
    SELECT relname, n_dead_tup FROM pg_stat_user_tables WHERE relname = ANY(%s)
"""
"""Read how many dead rows tables have been left with."""

# -- many workers


def load(run: Run) -> Iterator[Figure]:
    """Measure what is asked for of ``lease_ack_4x16``, ``fair_share``, ``other_writer_p99``."""
    if run.wants("lease_ack_4x16", "fair_share"):
        yield from _speed_and_shares(run)
    if run.wants("other_writer_p99"):
        yield _other_writer(run)


def _speed_and_shares(run: Run) -> Iterator[Figure]:
    project = run.on_file("load")
    first, last, rate, seen = _run_all(run, project)
    with Bare.like(run.folder / "bare.sqlite3", project.file) as bare:
        if run.wants("lease_ack_4x16"):
            run.say("the same row changes with bare sqlite3")
            yield judge(
                "lease_ack_4x16",
                rate,
                baseline=bare.rate(run.size(40_000, 4_000), CONCURRENCY),
                baseline_is=f"bare sqlite3, one process, {CONCURRENCY} jobs a commit",
                **seen,
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


def load_on_server(run: Run) -> Iterator[Figure]:
    """Measure what is asked for of ``pg_lease_ack_4x16`` and ``pg_over_one_by_one``."""
    if not run.wants("pg_lease_ack_4x16", "pg_over_one_by_one"):
        return
    with run.on_server() as project:
        *_, rate, seen = _run_all(run, project)
        run.say("the same jobs one by one, in plain SKIP LOCKED loops")
        plain = one_by_one(server_address(), run.size(20_000, 4_000), PROCESSES)
        for name in ("pg_lease_ack_4x16", "pg_over_one_by_one"):
            if run.wants(name):
                yield judge(
                    name,
                    rate,
                    baseline=plain,
                    baseline_is=f"{PROCESSES} plain loops, one job a transaction, SKIP LOCKED",
                    **seen,
                    dead_rows=_dead_rows(),
                )


def _run_all(run: Run, project: BenchProject) -> tuple[datetime, datetime, float, dict[str, Any]]:
    """Run jobs that do nothing in all workers; return `steady` of it, and what else was seen."""
    jobs = run.size(200_000, 20_000)
    with project.work(processes=PROCESSES, concurrency=CONCURRENCY) as workers:
        with project.paused():
            run.say(f"enqueueing {jobs:,} jobs")
            project.enqueue_noops(jobs)
            before = cpu_seconds(project.pids())
            run.say(f"running {jobs:,} jobs in {PROCESSES} workers of {CONCURRENCY} slots")
        project.wait_finished(workers)
        cpu = cpu_seconds(project.pids()) - before
    times = acked_since(0)
    if len(times) != jobs:
        raise LabError(f"{jobs:,} jobs were enqueued and {len(times):,} leases were acked")
    first, last, rate = steady(times)
    seen = {
        "jobs": jobs,
        "cpu_us_per_job": round(cpu / jobs * 1e6, 1),
        "window_seconds": (last - first).total_seconds(),
        "jobs_per_commit": round(jobs / len(set(times)), 1),
    }
    return first, last, rate, seen


def steady(times: list[datetime]) -> tuple[datetime, datetime, float]:
    """Return the window in which the middle of all acks happened, and the acks a second in it."""
    trim = int(len(times) * TRIMMED_SHARE)
    first, last = times[trim], times[-trim - 1]
    seconds = (last - first).total_seconds()
    if seconds <= 0:
        raise LabError(f"{len(times)} jobs are too few to measure a rate")
    return first, last, sum(first < moment <= last for moment in times) / seconds


def _shares(first: datetime, last: datetime) -> list[int]:
    """Return how many leases each worker was granted in a window."""
    granted = Lease.objects.filter(acquired_at__gt=first, acquired_at__lte=last)
    counts = Counter(granted.values_list("worker_id", flat=True))
    return sorted([*counts.values(), *[0] * (PROCESSES - len(counts))])


def _dead_rows() -> dict[str, int]:
    with connection.cursor() as cursor:
        cursor.execute(DEAD_ROWS, [[model._meta.db_table for model in (Job, Lease)]])
        return dict(cursor.fetchall())


# -- another program beside them


def _other_writer(run: Run) -> Figure:
    project = run.on_file("neighbour")
    jobs = run.size(150_000, 12_000)
    with project.work(processes=PROCESSES, concurrency=CONCURRENCY) as workers:
        with project.paused():
            run.say(f"enqueueing {jobs:,} jobs")
            project.enqueue_noops(jobs)
        run.say("writing beside the busy workers")
        project.wait("the first finished job", lambda: count(State.SUCCEEDED), seconds=60)
        writes = _write_while(lambda: count(State.READY) > jobs * TRIMMED_SHARE)
        project.wait_finished(workers)
    with Bare.like(run.folder / "alone.sqlite3", project.file) as bare:
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


def _write_while(busy: Callable[[], bool]) -> list[float | None]:
    """Write rows beside the workers, a commit for each; return milliseconds, None if refused."""
    taken: list[float | None] = []
    while busy():
        try:
            taken.append(timed(lambda: write_a_session(uuid4().hex)) * 1000)
        except OperationalError:
            taken.append(None)
        time.sleep(WRITE_PAUSE_SECONDS)  # a neighbour that writes now and then, not a fifth worker
    return taken


# -- one worker


def single(run: Run) -> Iterator[Figure]:
    """Measure ``lease_ack_1x1``: nothing to batch, so the number of commits is what counts.

    A round of the worker is timed from its first ack to its last.
    """
    project = run.on_file("single")
    project.enqueue_noops(1)  # the model of the bare rows
    jobs = run.size(1_000, 100)
    ours = theirs = 0.0
    commits = 0
    with (
        project.work(concurrency=1) as workers,
        Bare.like(run.folder / "bare.sqlite3", project.file) as bare,
    ):
        project.wait_finished(workers)
        before = cpu_seconds(project.pids())
        for number in range(ROUNDS):
            run.say(f"round {number + 1} of {ROUNDS}: {jobs:,} jobs each")
            theirs += bare.two_commit_seconds(jobs)
            last = Lease.objects.latest("id").pk
            project.run_noops(jobs, workers)
            times = acked_since(last)
            ours += (times[-1] - times[0]).total_seconds() * jobs / (jobs - 1)
            commits += len(set(times))
        cpu = cpu_seconds(project.pids()) - before
    yield judge(
        "lease_ack_1x1",
        ROUNDS * jobs / ours,
        baseline=ROUNDS * jobs / theirs,
        baseline_is="bare sqlite3, a commit for the claim and a commit for the ack",
        jobs=ROUNDS * jobs,
        commits_with_an_ack=commits,
        cpu_us_per_job=round(cpu / (ROUNDS * jobs) * 1e6, 1),
    )


# -- without a worker: claims from a huge table and from a small one


def depth(run: Run) -> Iterator[Figure]:
    """Measure ``claim_1m`` with the store's own verbs, in one process without slots.

    Each commit acks the last batch and claims the next, as a worker's tick does.
    """
    driven_by = "store.claim and store.settle in one process"
    large, small = run.on_file("large"), run.on_file("small")
    yield _depth(run, "claim_1m", large, small, driven_by=driven_by)


def depth_on_server(run: Run) -> Iterator[Figure]:
    """Measure ``pg_claim_1m`` in the same way."""
    if run.wants("pg_claim_1m"):
        with run.on_server() as large, run.on_server() as small:
            yield _depth(run, "pg_claim_1m", large, small)


def _depth(run: Run, name: str, large: BenchProject, small: BenchProject, **context: Any) -> Figure:
    rows = run.size(1_000_000, 100_000)
    jobs = run.size(100, 12) * CLAIM_BATCH
    run.say(f"filling a database with {rows:,} ready, scheduled and finished jobs each")
    large.use()
    large.fill(ready=rows, scheduled=rows, finished=rows)
    small.use()
    small.fill(ready=jobs * (CLAIM_ROUNDS + 2))
    seconds = {large: 0.0, small: 0.0}
    run.say("claiming from both in turns")
    for number in range(CLAIM_ROUNDS + 1):
        for project in seconds:
            project.use()
            count(State.READY)  # opens the connection
            taken = timed(lambda: _claim_and_ack(jobs))
            seconds[project] += taken if number else 0.0  # the first round fills the caches
    return judge(
        name,
        CLAIM_ROUNDS * jobs / seconds[large],
        baseline=CLAIM_ROUNDS * jobs / seconds[small],
        baseline_is=f"the same in a table of {jobs * (CLAIM_ROUNDS + 2):,} ready jobs",
        ready=rows,
        scheduled=rows,
        finished=rows,
        jobs_per_commit=CLAIM_BATCH,
        **context,
    )


def _claim_and_ack(jobs: int) -> None:
    held: list[Claim] = []
    for _ in range(jobs // CLAIM_BATCH):
        held = _tick(held, CLAIM_BATCH)
        if len(held) < CLAIM_BATCH:
            raise LabError("the queue ran dry before the measurement was over")
    _tick(held, 0)


def _tick(held: list[Claim], limit: int) -> list[Claim]:
    acks = [Settlement("ack", claim.lease_id, claim.token, result="null") for claim in held]
    with store.transaction() as tx:
        refused = [answer for answer in store.settle(tx, acks) if not answer.accepted]
        if refused:
            raise LabError(f"an ack was refused: {refused[0].reason}")
        return store.claim(tx, worker_id=None, queues=[QUEUE], limit=limit)


# -- without a worker: enqueueing


def enqueue(run: Run) -> Iterator[Figure]:
    """Measure what is asked for of ``enqueue_one`` and ``enqueue_bulk``."""
    project = run.on_file("enqueue")
    project.enqueue_noops(1)  # makes the queue, and is the model of the bare rows
    with Bare.like(run.folder / "bare.sqlite3", project.file) as bare:
        if run.wants("enqueue_one"):
            yield _enqueue_one(run, bare)
        if run.wants("enqueue_bulk"):
            yield _enqueue_bulk(run, bare, project)


def _enqueue_one(run: Run, bare: Bare) -> Figure:
    jobs = run.size(400, 80)
    run.say(f"enqueueing {ROUNDS * jobs:,} jobs one by one")
    ours, theirs, cpu = _in_turns(jobs, noop.enqueue, bare.insert)
    return judge(
        "enqueue_one",
        len(ours) / sum(ours),
        baseline=len(theirs) / sum(theirs),
        baseline_is="bare sqlite3, insert and commit of a like row",
        cpu_us_per_job=round(cpu / len(ours) * 1e6, 1),
        p50_us=round(median(ours) * 1e6),
        bare_p50_us=round(median(theirs) * 1e6),
        p50_ratio=round(median(theirs) / median(ours), 3),
    )


def _enqueue_bulk(run: Run, bare: Bare, project: BenchProject) -> Figure:
    jobs = run.size(40_000, 5_000)
    run.say(f"enqueueing {ROUNDS * jobs:,} jobs, many a commit")
    ours, theirs, cpu = _in_turns(1, lambda: project.enqueue_noops(jobs), lambda: bare.insert(jobs))
    return judge(
        "enqueue_bulk",
        jobs / median(ours),
        baseline=jobs / median(theirs),
        baseline_is="bare sqlite3, executemany of like rows",
        cpu_us_per_job=round(cpu / (ROUNDS * jobs) * 1e6, 1),
        jobs_per_commit=min(jobs, BATCH),
    )


def _in_turns(
    times: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> tuple[list[float], list[float], float]:
    """Call both so many times in each round; return the seconds of each, and ours of a processor."""
    our_seconds: list[float] = []
    their_seconds: list[float] = []
    cpu = 0.0
    for _ in range(ROUNDS):
        their_seconds += [timed(theirs) for _ in range(times)]
        before = time.process_time()
        our_seconds += [timed(ours) for _ in range(times)]
        cpu += time.process_time() - before
    return our_seconds, their_seconds, cpu
