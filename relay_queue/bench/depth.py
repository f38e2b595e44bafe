"""Claims from a queue with a million jobs, beside claims from a small one."""

from __future__ import annotations

from collections.abc import Iterator

from relay_queue import store
from relay_queue.bench import scratch
from relay_queue.bench.figures import Figure, judge
from relay_queue.bench.filling import fill
from relay_queue.bench.measuring import BenchError, timed
from relay_queue.bench.run import Run
from relay_queue.states import State
from relay_queue.store.records import Claim, Settlement

BATCH = 64
ROUNDS = 8


def measure(run: Run) -> Iterator[Figure]:
    """Measure ``claim_1m`` with the store's own verbs, in one process without slots.

    Each commit acks the last batch and claims the next, as a worker's tick does. The two databases
    take turns, so that a slow moment of the disk hits both.
    """
    large, small = run.folder / "large.sqlite3", run.folder / "small.sqlite3"
    rows = run.size(1_000_000, 100_000)
    jobs = run.size(100, 12) * BATCH
    run.say(f"filling a database with {rows:,} ready, scheduled and finished jobs each")
    scratch.use(large)
    fill(large, ready=rows, scheduled=rows, finished=rows)
    scratch.use(small)
    fill(small, ready=jobs * (ROUNDS + 2))
    seconds = {large: 0.0, small: 0.0}
    run.say("claiming from both in turns")
    for number in range(ROUNDS + 1):
        for database in seconds:
            scratch.switch(database)
            taken = turn(jobs)
            seconds[database] += taken if number else 0.0  # the first round fills the caches
    yield judge(
        "claim_1m",
        ROUNDS * jobs / seconds[large],
        baseline=ROUNDS * jobs / seconds[small],
        baseline_is=f"the same in a table of {jobs * (ROUNDS + 2):,} ready jobs",
        ready=rows,
        scheduled=rows,
        finished=rows,
        jobs_per_commit=BATCH,
        driven_by="store.claim and store.settle in one process",
    )


def turn(jobs: int) -> float:
    """Return the seconds of so many claims and acks in the database that is in use."""
    scratch.count(State.READY)  # opens the connection
    return timed(lambda: _claim_and_ack(jobs))


def _claim_and_ack(jobs: int) -> None:
    held: list[Claim] = []
    for _ in range(jobs // BATCH):
        held = _tick(held, BATCH)
        if len(held) < BATCH:
            raise BenchError("the queue ran dry before the measurement was over")
    _tick(held, 0)


def _tick(held: list[Claim], limit: int) -> list[Claim]:
    told = [Settlement("ack", claim.lease_id, claim.token, result="null") for claim in held]
    with store.transaction() as tx:
        refused = [answer for answer in store.settle(tx, told) if not answer.accepted]
        if refused:
            raise BenchError(f"an ack was refused: {refused[0].reason}")
        return store.claim(tx, worker_id=None, queues=[scratch.QUEUE], limit=limit)
