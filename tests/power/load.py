"""The load that is recorded: ``python -m tests.power.load client SEED ROUNDS`` or ``worker ARGS``.

Both note in the record what Relay has told them, each time after the commit has returned. Whatever
is noted before a power cut must be on the disk after it.
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from typing import Any

import django

from tests.power.stamp import stamp

TASKS = "tests.power.chores"


def work(*arguments: str) -> None:
    """Run workers that note what each of their ticks has committed."""
    from django.core.management import execute_from_command_line

    from relay_queue.worker import loop

    tick = loop.tick

    def noting(plan: Any) -> Any:
        done = tick(plan)
        for claim in done.claims:
            stamp(what="claimed", job=claim.job_id, lease=claim.lease_id)
        verbs = {told.lease_id: told.verb for told in done.settlements}
        for answer in done.answers:
            if answer.accepted:
                verb = verbs[answer.lease_id]
                stamp(what=verb, job=answer.job_id, lease=answer.lease_id, state=answer.state)
        return done

    loop.tick = noting
    execute_from_command_line(["manage.py", "runworker", *arguments])


def produce(seed: str, rounds: str) -> None:
    """Enqueue jobs of all kinds, few or many in a commit, and cancel some."""
    from relay_queue import clock, store

    dice = random.Random(seed)
    for number in range(int(rounds)):
        kinds = dice.choices(["succeed", "fail", "write", "snooze"], [5, 2, 2, 1], k=8)
        jobs = [
            store.new_job(task=f"{TASKS}.{kind}", args=["x" * dice.choice([1, 50, 9000])])
            for kind in kinds[: dice.choice([1, 1, 2, 8])]
        ]
        later = clock.now() + timedelta(days=1)
        jobs.append(store.new_job(task=f"{TASKS}.succeed", args=["later"], run_after=later))
        with store.transaction() as tx:
            added = [one.job_id for one in store.enqueue_many(tx, jobs)]
        for job_id in added:
            stamp(what="enqueued", job=job_id)
        if number % 2:
            with store.transaction() as tx:
                store.cancel(tx, added[-1:])
            stamp(what="cancelled", job=added[-1])


def main(role: str, *arguments: str) -> None:
    """Set Django up and play one part."""
    django.setup()
    {"worker": work, "client": produce}[role](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
