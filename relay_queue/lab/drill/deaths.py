"""Rows in which processes are killed: F1, F2, F5, F6."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from django.contrib.sessions.models import Session

from relay_queue import store
from relay_queue.lab import tasks
from relay_queue.lab.drill.results import Observation, equal
from relay_queue.lab.project import ENDED, ScratchProject
from relay_queue.models import Worker
from relay_queue.query import ledger
from relay_queue.states import State
from relay_queue.verdict import Verdict

NEVER = "never made"


def before_the_effect(project: ScratchProject) -> Iterator[Observation]:
    """F1: kill a worker whose function has not done its work yet."""
    project.work(processes=2)
    job = project.enqueue(tasks.wait_first_time, NEVER)
    killed = project.wait_run(job)
    os.kill(killed.pid, signal.SIGKILL)
    project.wait_state(job, State.SUCCEEDED)
    effects = project.runs(job, ENDED)
    yield equal("attempts", project.outcomes(job), ["lost", "acked"])
    yield equal("effects", len(effects), 1)
    yield equal("effects of the killed process", sum(e.pid == killed.pid for e in effects), 0)


def after_the_effect(project: ScratchProject) -> Iterator[Observation]:
    """F2: kill a worker whose function has done its work and has not returned."""
    project.work(processes=2)
    job = project.enqueue(tasks.wait_first_time, NEVER)
    os.kill(project.wait_run(job).pid, signal.SIGKILL)
    project.wait_state(job, State.SUCCEEDED)
    epochs = [effect.epoch for effect in project.runs(job)]
    leases = [lease.pk for lease in project.ledger(job)]
    yield equal("attempts", project.outcomes(job), ["lost", "acked"])
    yield equal("effects", len(epochs), 2)
    yield equal("under leases of their own", "yes" if epochs == leases else "no", "yes")
    story = ledger.story(job)
    yield equal("the ledger says", str(story.verdict.label), str(Verdict.INTERRUPTED.label))


def inside_a_transaction(project: ScratchProject) -> Iterator[Observation]:
    """F5: kill workers inside a claim, an ack, and a function's own transaction."""
    project.make("die_after_claim")
    project.work(fault="death")
    claimed = project.enqueue(tasks.finish)
    project.wait_state(claimed, State.SUCCEEDED)
    yield equal("attempts, claim cut short", project.outcomes(claimed), ["acked"])
    project.make("die_after_settle")
    acked = project.enqueue(tasks.finish)
    project.wait_state(acked, State.SUCCEEDED)
    yield equal("attempts, ack cut short", project.outcomes(acked), ["lost", "acked"])
    together = project.enqueue(tasks.write_together, NEVER)
    os.kill(project.wait_run(together).pid, signal.SIGKILL)
    project.wait_state(together, State.SUCCEEDED)
    rows = list(Session.objects.values_list("session_key", flat=True))
    yield equal(
        "attempts, atomic function cut short", project.outcomes(together), ["lost", "acked"]
    )
    yield equal("rows it has written", rows, ["attempt 2"])
    yield equal("workers killed", Worker.objects.exclude(stopped_at=None).count(), 3)


def all_at_once(project: ScratchProject) -> Iterator[Observation]:
    """F6: kill the supervisor and all workers while leases are open, and start new ones."""
    first = project.work(processes=2)
    again = project.enqueue(tasks.wait_first_time, NEVER)
    last = project.enqueue(tasks.wait_first_time, NEVER, max_attempts=1)
    for job in (again, last):
        project.wait_run(job)
    first.kill()
    project.work()
    done = project.wait_state(again, State.SUCCEEDED)
    dead = project.wait_state(last, State.DEAD)
    yield equal("attempts, some left", project.outcomes(again), ["lost", "acked"])
    yield equal("attempts, none left", [*project.outcomes(last), dead.state], ["lost", "dead"])
    void = project.ledger(again)[0]
    early = done.started_at is not None and done.started_at < void.expires_at
    yield equal("run again before its lease was over", "yes" if early else "no", "yes")
    accepted = project.do(store.ack, void.pk, void.token).accepted
    yield equal("ack by an old token", "accepted" if accepted else "refused", "refused")
