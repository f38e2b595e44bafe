"""Rows about time: outcomes that come too late (F3, F4, F9, F10), and a clock that jumps (F15)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from io import StringIO

from django.core.management import call_command

from relay_queue.lab import tasks
from relay_queue.lab.drill.results import Observation, contains, equal
from relay_queue.lab.faults import jump_clock
from relay_queue.lab.processes import is_alive
from relay_queue.lab.project import TOLD, ScratchProject
from relay_queue.states import State

LEASE_SECONDS = 3.0
"""Of the next attempt, too, which a busy machine must not let run out as well."""

TIMEOUT_SECONDS = 1.0
CLOCK_TIMEOUT_SECONDS = 2.0
DAY_SECONDS = 86_400
GO, LATER, NEVER = "go", "later", "never made"


def after_expiry(project: ScratchProject) -> Iterator[Observation]:
    """F3: stop the only worker until its lease is over; its function is done meanwhile."""
    project.work()
    job = project.enqueue(tasks.wait, GO, lease_seconds=LEASE_SECONDS)
    owner = project.wait_run(job)
    with project.stopped(owner.pid):
        project.wait_expiry(job)
        project.make(GO)
    late = project.wait_refused(job)
    done = project.wait_state(job, State.SUCCEEDED)
    yield equal("attempts", project.outcomes(job), ["expired", "acked"])
    yield equal("refused of attempt 1", late.refused_verb, "ack")
    yield contains("because", late.refused_reason, "expired")
    yield equal("result kept", done.result, '"attempt 2"')


def after_another_claim(project: ScratchProject) -> Iterator[Observation]:
    """F4: stop a worker until another has run its job, then let it come back."""
    project.work(processes=2)
    job = project.enqueue(tasks.wait_first_time, GO, lease_seconds=LEASE_SECONDS)
    owner = project.wait_run(job)
    with project.stopped(owner.pid):
        project.wait_state(job, State.SUCCEEDED)
        before = project.columns(job)
        project.make(GO)
    late = project.wait_refused(job)
    first, second = project.runs(job)
    yield equal("attempts", project.outcomes(job), ["expired", "acked"])
    yield equal("processes", len({first.pid, second.pid}), 2)
    yield equal("refused of attempt 1", late.refused_verb, "ack")
    yield contains("because", late.refused_reason, "had ended")
    yield equal("changed by it", changed(before, project.columns(job)), [])


def past_the_timeout(project: ScratchProject) -> Iterator[Observation]:
    """F9: let functions hang in all slots of a process."""
    workers = project.work(processes=2, concurrency=1)
    job = project.enqueue(tasks.wait_first_time, GO, timeout_seconds=TIMEOUT_SECONDS)
    first = project.wait_run(job)
    project.wait_state(job, State.SUCCEEDED)
    before = project.columns(job)
    project.make(GO)
    late = project.wait_refused(job)
    yield equal("attempts", project.outcomes(job), ["timed_out", "acked"])
    elsewhere = project.runs(job)[1].pid != first.pid
    yield equal("in another process", "yes" if elsewhere else "no", "yes")
    yield equal("refused of attempt 1", late.refused_verb, "ack")
    yield equal("changed by it", changed(before, project.columns(job)), [])
    stuck = project.enqueue(tasks.wait_first_time, NEVER, timeout_seconds=TIMEOUT_SECONDS)
    hung = project.wait_run(stuck)
    project.wait("the end of the stuck process", lambda: not is_alive(hung.pid))
    project.wait("a process in its place", lambda: len(set(project.pids()) - {hung.pid}) == 2)
    ended = f"process {hung.pid}, ended with exit code 71"
    yield equal("stuck process", "replaced" if ended in workers.said() else "lost", "replaced")


def after_cancel(project: ScratchProject) -> Iterator[Observation]:
    """F10: cancel a job whose function is under way."""
    project.work()
    job = project.enqueue(tasks.wait_politely)
    project.wait_run(job)
    call_command("relay", "cancel", str(job), stdout=StringIO())
    at_once = project.job(job).state
    project.wait_run(job, event=TOLD)
    late = project.wait_refused(job)
    after = project.job(job)
    yield equal("at once", at_once, "cancelled")
    yield equal("functions told", len(project.runs(job, TOLD)), 1)
    yield equal("attempts", project.outcomes(job), ["cancelled"])
    yield equal("refused of it", late.refused_verb, "ack")
    yield equal(
        "afterwards", [after.state, after.result or "no result"], ["cancelled", "no result"]
    )


def changed(before: dict[str, object], after: dict[str, object]) -> Sequence[str]:
    """Return the names of the columns that differ."""
    return [name for name in before if before[name] != after[name]]


# -- the clock


def jumping_clock(project: ScratchProject) -> Iterator[Observation]:
    """F15: set the clock of all workers a day ahead, then back, then a day behind."""
    project.work(processes=2, fault="clock")
    yield from _ahead(project)
    yield from _behind(project)


def _ahead(project: ScratchProject) -> Iterator[Observation]:
    job = project.enqueue(tasks.wait_first_time, GO)
    project.wait_run(job)
    _set_clock(project, DAY_SECONDS)
    project.enqueue(tasks.finish)  # any traffic, so that a worker looks
    project.wait("the second attempt", lambda: project.outcomes(job)[-1] == "acked")
    project.make(GO)
    late = project.wait_refused(job)
    yield equal("attempts, a day ahead", project.outcomes(job), ["expired", "acked"])
    yield equal("refused of attempt 1", late.refused_verb, "ack")
    ledger = project.ledger(job)
    both = sum(
        earlier.ended_at is None or earlier.ended_at > later.acquired_at
        for earlier, later in itertools.pairwise(ledger)
    )
    yield equal("leases valid at once", both, 0)
    _set_clock(project, 0)


def _behind(project: ScratchProject) -> Iterator[Observation]:
    runs = project.enqueue(tasks.wait, LATER, lease_seconds=LEASE_SECONDS)
    hangs = project.enqueue(tasks.wait_first_time, LATER, timeout_seconds=CLOCK_TIMEOUT_SECONDS)
    for job in (runs, hangs):
        project.wait_run(job)
    before = project.ledger(runs)[0].renewed_at
    _set_clock(project, -DAY_SECONDS)
    project.wait("the time limit", lambda: project.outcomes(hangs)[0] == "timed_out")
    project.wait("a renewal", lambda: project.ledger(runs)[0].renewed_at != before)
    project.make(LATER)
    for job in (runs, hangs):
        project.wait_state(job, State.SUCCEEDED)
    yield equal("attempts, a day behind", project.outcomes(runs), ["acked"])
    yield equal("attempts past a time limit there", project.outcomes(hangs), ["timed_out", "acked"])


def _set_clock(project: ScratchProject, seconds: int) -> None:
    # In one step: a reader must not find the file empty.
    new = project.directory / "offset"
    new.write_text(str(seconds))
    new.rename(project.directory / jump_clock.__name__)
