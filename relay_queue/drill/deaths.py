"""Rows in which processes are killed: F1, F2, F5, F6."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from django.contrib.sessions.models import Session

from relay_queue import store
from relay_queue.drill import tasks
from relay_queue.drill.ground import Ground
from relay_queue.drill.observation import Observation, equal
from relay_queue.models import Worker
from relay_queue.states import State
from relay_queue.store import report
from relay_queue.verdict import Verdict

NEVER = "never made"


def before_the_effect(ground: Ground) -> Iterator[Observation]:
    """F1: kill a worker whose function has not done its work yet."""
    ground.work(processes=2)
    job = ground.enqueue(tasks.wait_first_time, NEVER)
    killed = ground.wait_run(job)
    os.kill(killed.pid, signal.SIGKILL)
    ground.wait_state(job, State.SUCCEEDED)
    effects = ground.runs(job, tasks.ENDED)
    yield equal("attempts", ground.outcomes(job), ["lost", "acked"])
    yield equal("effects", len(effects), 1)
    yield equal("effects of the killed process", sum(e.pid == killed.pid for e in effects), 0)


def after_the_effect(ground: Ground) -> Iterator[Observation]:
    """F2: kill a worker whose function has done its work and has not returned."""
    ground.work(processes=2)
    job = ground.enqueue(tasks.wait_first_time, NEVER)
    os.kill(ground.wait_run(job).pid, signal.SIGKILL)
    ground.wait_state(job, State.SUCCEEDED)
    epochs = [effect.epoch for effect in ground.runs(job)]
    leases = [lease.pk for lease in ground.ledger(job)]
    yield equal("attempts", ground.outcomes(job), ["lost", "acked"])
    yield equal("effects", len(epochs), 2)
    yield equal("under leases of their own", "yes" if epochs == leases else "no", "yes")
    story = report.story(job)
    yield equal("the ledger says", str(story.verdict.label), str(Verdict.INTERRUPTED.label))


def inside_a_transaction(ground: Ground) -> Iterator[Observation]:
    """F5: kill workers inside a claim, an ack, and a function's own transaction."""
    ground.make("die_after_claim")
    ground.work(fault="death")
    claimed = ground.enqueue(tasks.note)
    ground.wait_state(claimed, State.SUCCEEDED)
    yield equal("attempts, claim cut short", ground.outcomes(claimed), ["acked"])
    ground.make("die_after_settle")
    acked = ground.enqueue(tasks.note)
    ground.wait_state(acked, State.SUCCEEDED)
    yield equal("attempts, ack cut short", ground.outcomes(acked), ["lost", "acked"])
    together = ground.enqueue(tasks.write_together, NEVER)
    os.kill(ground.wait_run(together).pid, signal.SIGKILL)
    ground.wait_state(together, State.SUCCEEDED)
    rows = list(Session.objects.values_list("session_key", flat=True))
    yield equal("attempts, atomic function cut short", ground.outcomes(together), ["lost", "acked"])
    yield equal("rows it has written", rows, ["attempt 2"])
    yield equal("workers killed", Worker.objects.exclude(stopped_at=None).count(), 3)


def all_at_once(ground: Ground) -> Iterator[Observation]:
    """F6: kill the supervisor and all workers while leases are open, and start new ones."""
    first = ground.work(processes=2)
    again = ground.enqueue(tasks.wait_first_time, NEVER)
    last = ground.enqueue(tasks.wait_first_time, NEVER, max_attempts=1)
    for job in (again, last):
        ground.wait_run(job)
    first.kill()
    ground.work()
    done = ground.wait_state(again, State.SUCCEEDED)
    dead = ground.wait_state(last, State.DEAD)
    yield equal("attempts, some left", ground.outcomes(again), ["lost", "acked"])
    yield equal("attempts, none left", [*ground.outcomes(last), dead.state], ["lost", "dead"])
    void = ground.ledger(again)[0]
    early = done.started_at is not None and done.started_at < void.expires_at
    yield equal("run again before its lease was over", "yes" if early else "no", "yes")
    accepted = ground.do(store.ack, void.pk, void.token).accepted
    yield equal("ack by an old token", "accepted" if accepted else "refused", "refused")
