"""``relay recover``: end the leases whose time or owner is gone, now."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from math import inf

from django.db import connections

from relay_queue import conf, store
from relay_queue.cli.base import Output, add_json
from relay_queue.cli.output import short
from relay_queue.query import looks
from relay_queue.store.dialects import dialect_for
from relay_queue.store.operate import BATCH
from relay_queue.store.records import Recovered
from relay_queue.worker.database import in_one_line
from relay_queue.worker.liveness import CONFIRM_SECONDS, DeadWorkers

HELP = (
    "End the leases of workers that are proven dead, and those that have expired, and send their "
    "jobs on. Workers do this by themselves; this is for when none runs."
)

SHOWN = 20
NO_WORKER = 0  # No row has this id, so every registered worker is examined.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    parser.add_argument(
        "--recount",
        action="store_true",
        help="also set the counters of every queue to what its jobs are; holds the writer",
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Recover from dead workers, then from expiry; exit with 1 if any lease is left."""
    connection = connections[conf.get().database]
    dialect_for(connection).read_anything(connection)
    trial = store.Trial()
    dead, lost = _recover_dead(trial)
    ended = lost + _recover_expired(trial)
    recounted = _recount() if options.recount else []
    out.data(
        {
            "dead_workers": dead,
            "recounted_queues": recounted,
            "recovered": [
                {
                    "lease_id": one.lease_id,
                    "job_id": one.job_id,
                    "queue": one.queue,
                    "outcome": str(one.outcome),
                    "state": str(one.state),
                }
                for one in ended
            ],
        }
    )
    if recounted:
        out.line(f"Counted anew: {', '.join(recounted)}.")
    out.line(f"Workers found dead: {len(dead)}. Leases ended: {len(ended):,}.")
    if ended:
        counts = Counter((one.queue, str(one.outcome), str(one.state)) for one in ended)
        out.table(
            ["queue", "lease", "job went to", "jobs"],
            [[short(key[0]), *key[1:], n] for key, n in sorted(counts.items())],
        )
        ids = ", ".join(str(one.job_id) for one in ended[:SHOWN])
        out.line(f"Jobs: {ids}" + (" and more" if len(ended) > SHOWN else ""))
    for step, error in trial.faults.items():
        why = in_one_line(error)
        out.warn(f"Cannot {step}: {why}. What is left stays as it is: see relay doctor.")
    return 1 if trial.faults else 0


def _recover_dead(trial: store.Trial) -> tuple[list[int], list[Recovered]]:
    """End the leases of dead workers; return the workers' ids and the leases."""
    siblings = DeadWorkers()
    ended: list[Recovered] = []
    try:
        _find(siblings)
        dead = sorted(siblings.probes)
        while siblings.probes:
            with store.transaction() as tx:
                batch = siblings.recover(tx, trial=trial)
            siblings.forget()
            ended += batch
            if trial.faults and not batch:
                break  # the other leases, and with them the rows of their workers, have to wait
    finally:
        siblings.close()
    return dead, ended


def _find(siblings: DeadWorkers) -> None:
    """Find the dead workers; a session whose lock is free is examined a second time."""
    siblings.find(conf.get().database, NO_WORKER, watched=inf)
    if siblings.suspects:
        time.sleep(CONFIRM_SECONDS)  # a free session lock must be seen twice
        siblings.find(conf.get().database, NO_WORKER, watched=inf)


def _recount() -> list[str]:
    """Set the counters of all queues, each in a transaction of its own; return their names."""
    queues = looks.read_queues().queues
    for queue in queues:
        with store.transaction() as tx:
            store.recount(tx, queue)
    return queues


def _recover_expired(trial: store.Trial) -> list[Recovered]:
    ended: list[Recovered] = []
    while True:
        with store.transaction() as tx:
            batch = store.recover_expired(tx, BATCH, trial=trial)
        ended += batch
        # A trial may also mark unreadable jobs, which are not among those that ended.
        if not batch:
            return ended
