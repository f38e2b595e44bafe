"""The figures of a PostgreSQL server: speed under load, depth, and pickup by an idle worker."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import connection

from relay_queue.bench import depth, latency, load, scratch, server
from relay_queue.bench.figures import Figure, judge
from relay_queue.bench.measuring import BenchError, percentile
from relay_queue.bench.run import Run
from relay_queue.models import Job, Lease


def measure(run: Run) -> Iterator[Figure]:
    """Measure what is asked for of the figures that begin with ``pg_``."""
    if run.wants("pg_lease_ack_4x16", "pg_over_one_by_one"):
        with server.scratch_database():
            yield from _load(run)
    if run.wants("pg_claim_1m"):
        yield _depth(run)
    if run.wants("pg_pickup_p50"):
        with server.scratch_database():
            yield _pickup(run)


def _load(run: Run) -> Iterator[Figure]:
    jobs = run.size(200_000, 20_000)
    cpu = load.run_all(run, jobs)
    times = scratch.acked_since(0)
    if len(times) != jobs:
        raise BenchError(f"{jobs:,} jobs were enqueued and {len(times):,} leases were acked")
    first, last, rate = load.steady(times)
    run.say("the same jobs one by one, in plain SKIP LOCKED loops")
    plain = server.one_job_a_transaction(run.size(20_000, 4_000), load.PROCESSES)
    for name in ("pg_lease_ack_4x16", "pg_over_one_by_one"):
        if run.wants(name):
            yield judge(
                name,
                rate,
                baseline=plain,
                baseline_is=f"{load.PROCESSES} plain loops, one job a transaction, SKIP LOCKED",
                jobs=jobs,
                cpu_us_per_job=round(cpu / jobs * 1e6, 1),
                window_seconds=(last - first).total_seconds(),
                jobs_per_commit=round(jobs / len(set(times)), 1),
                dead_rows=_dead_rows(),
            )


def _dead_rows() -> dict[str, int]:
    """Return how many dead rows each hot table has been left with."""
    tables = [model._meta.db_table for model in (Job, Lease)]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, n_dead_tup FROM pg_stat_user_tables WHERE relname = ANY(%s)", [tables]
        )
        return dict(cursor.fetchall())


def _depth(run: Run) -> Figure:
    rows = run.size(1_000_000, 100_000)
    jobs = run.size(100, 12) * depth.BATCH
    with server.scratch_database() as large, server.scratch_database() as small:
        run.say(f"filling a database with {rows:,} ready, scheduled and finished jobs each")
        server.switch(large)
        server.fill(ready=rows, scheduled=rows, finished=rows)
        server.switch(small)
        server.fill(ready=jobs * (depth.ROUNDS + 2))
        seconds = {large: 0.0, small: 0.0}
        run.say("claiming from both in turns")
        for number in range(depth.ROUNDS + 1):
            for name in seconds:
                server.switch(name)
                taken = depth.turn(jobs)
                seconds[name] += taken if number else 0.0  # the first round fills the caches
    return judge(
        "pg_claim_1m",
        depth.ROUNDS * jobs / seconds[large],
        baseline=depth.ROUNDS * jobs / seconds[small],
        baseline_is=f"the same in a table of {jobs * (depth.ROUNDS + 2):,} ready jobs",
        ready=rows,
        scheduled=rows,
        finished=rows,
        jobs_per_commit=depth.BATCH,
    )


def _pickup(run: Run) -> Figure:
    with scratch.Fleet(1, latency.CONCURRENCY) as fleet:
        samples = run.size(500, 300)
        run.say(f"enqueueing {samples:,} jobs, one at a time, for an idle worker")
        taken = latency.pick_ups(fleet, samples, run.size(0.03, 0.01))
    return judge(
        "pg_pickup_p50",
        percentile(taken, 50),
        samples=len(taken),
        p99_ms=round(percentile(taken, 99), 3),
        max_ms=round(max(taken), 3),
    )
