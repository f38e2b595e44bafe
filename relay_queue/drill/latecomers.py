"""Rows in which somebody comes back after his time: F3, F4, F9, F10."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

from django.core.management import call_command

from relay_queue.drill import tasks
from relay_queue.drill.ground import Ground, changed, is_over
from relay_queue.drill.observation import Observation, contains, equal
from relay_queue.scratch.processes import is_alive
from relay_queue.states import State

LEASE_SECONDS = 3.0
"""Of the next attempt, too, which a busy machine must not let run out as well."""

TIMEOUT_SECONDS = 1.0
GO, NEVER = "go", "never made"


def after_expiry(ground: Ground) -> Iterator[Observation]:
    """F3: stop the only worker until its lease is over; its function is done meanwhile."""
    ground.work()
    job = ground.enqueue(tasks.wait, GO, lease_seconds=LEASE_SECONDS)
    owner = ground.wait_run(job)
    with ground.stopped(owner.pid):
        ground.wait(lambda: is_over(ground.ledger(job)[0]), "the end of the lease")
        ground.make(GO)
    late = ground.wait_refused(job)
    done = ground.wait_state(job, State.SUCCEEDED)
    yield equal("attempts", ground.outcomes(job), ["expired", "acked"])
    yield equal("refused of attempt 1", late.refused_verb, "ack")
    yield contains("because", late.refused_reason, "expired")
    yield equal("result kept", done.result, '"attempt 2"')


def after_another_claim(ground: Ground) -> Iterator[Observation]:
    """F4: stop a worker until another has run its job, then let it come back."""
    ground.work(processes=2)
    job = ground.enqueue(tasks.wait_first_time, GO, lease_seconds=LEASE_SECONDS)
    owner = ground.wait_run(job)
    with ground.stopped(owner.pid):
        ground.wait_state(job, State.SUCCEEDED)
        before = ground.columns(job)
        ground.make(GO)
    late = ground.wait_refused(job)
    first, second = ground.runs(job)
    yield equal("attempts", ground.outcomes(job), ["expired", "acked"])
    yield equal("processes", len({first.pid, second.pid}), 2)
    yield equal("refused of attempt 1", late.refused_verb, "ack")
    yield contains("because", late.refused_reason, "had ended")
    yield equal("changed by it", changed(before, ground.columns(job)), [])


def past_the_timeout(ground: Ground) -> Iterator[Observation]:
    """F9: let functions hang in all slots of a process."""
    workers = ground.work(processes=2, concurrency=1)
    job = ground.enqueue(tasks.wait_first_time, GO, timeout_seconds=TIMEOUT_SECONDS)
    first = ground.wait_run(job)
    ground.wait_state(job, State.SUCCEEDED)
    before = ground.columns(job)
    ground.make(GO)
    late = ground.wait_refused(job)
    yield equal("attempts", ground.outcomes(job), ["timed_out", "acked"])
    elsewhere = ground.runs(job)[1].pid != first.pid
    yield equal("in another process", "yes" if elsewhere else "no", "yes")
    yield equal("refused of attempt 1", late.refused_verb, "ack")
    yield equal("changed by it", changed(before, ground.columns(job)), [])
    stuck = ground.enqueue(tasks.wait_first_time, NEVER, timeout_seconds=TIMEOUT_SECONDS)
    hung = ground.wait_run(stuck)
    ground.wait(lambda: not is_alive(hung.pid), "the end of the stuck process")
    ground.wait(lambda: len(set(ground.pids()) - {hung.pid}) == 2, "a process in its place")
    ended = f"process {hung.pid}, ended with exit code 71"
    yield equal("stuck process", "replaced" if ended in workers.said() else "lost", "replaced")


def after_cancel(ground: Ground) -> Iterator[Observation]:
    """F10: cancel a job whose function is under way."""
    ground.work()
    job = ground.enqueue(tasks.wait_politely)
    ground.wait_run(job)
    call_command("relay", "cancel", str(job), stdout=StringIO())
    at_once = ground.job(job).state
    ground.wait_run(job, event=tasks.TOLD)
    late = ground.wait_refused(job)
    after = ground.job(job)
    yield equal("at once", at_once, "cancelled")
    yield equal("functions told", len(ground.runs(job, tasks.TOLD)), 1)
    yield equal("attempts", ground.outcomes(job), ["cancelled"])
    yield equal("refused of it", late.refused_verb, "ack")
    yield equal(
        "afterwards", [after.state, after.result or "no result"], ["cancelled", "no result"]
    )
