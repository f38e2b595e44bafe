"""The row in which the system clock jumps: F15."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from relay_queue.drill import tasks
from relay_queue.drill.ground import Ground
from relay_queue.drill.observation import Observation, equal
from relay_queue.states import State

DAY_SECONDS = 86_400
LEASE_SECONDS = 3.0
TIMEOUT_SECONDS = 2.0
CLOCK = "jump_clock"
GO, LATER = "go", "later"


def jumping_clock(ground: Ground) -> Iterator[Observation]:
    """F15: set the clock of all workers a day ahead, then back, then a day behind."""
    ground.work(processes=2, fault="clock")
    yield from _ahead(ground)
    yield from _behind(ground)


def _ahead(ground: Ground) -> Iterator[Observation]:
    job = ground.enqueue(tasks.wait_first_time, GO)
    ground.wait_run(job)
    _set_clock(ground, DAY_SECONDS)
    ground.enqueue(tasks.note)  # any traffic, so that somebody looks
    ground.wait(lambda: ground.outcomes(job)[-1] == "acked", "the second attempt")
    ground.make(GO)
    late = ground.wait_refused(job)
    yield equal("attempts, a day ahead", ground.outcomes(job), ["expired", "acked"])
    yield equal("refused of attempt 1", late.refused_verb, "ack")
    ledger = ground.ledger(job)
    both = sum(
        earlier.ended_at is None or earlier.ended_at > later.acquired_at
        for earlier, later in itertools.pairwise(ledger)
    )
    yield equal("leases valid at once", both, 0)
    _set_clock(ground, 0)


def _behind(ground: Ground) -> Iterator[Observation]:
    runs = ground.enqueue(tasks.wait, LATER, lease_seconds=LEASE_SECONDS)
    hangs = ground.enqueue(tasks.wait_first_time, LATER, timeout_seconds=TIMEOUT_SECONDS)
    for job in (runs, hangs):
        ground.wait_run(job)
    before = ground.ledger(runs)[0].renewed_at
    _set_clock(ground, -DAY_SECONDS)
    ground.wait(lambda: ground.outcomes(hangs)[0] == "timed_out", "the time limit")
    ground.wait(lambda: ground.ledger(runs)[0].renewed_at != before, "a renewal")
    ground.make(LATER)
    for job in (runs, hangs):
        ground.wait_state(job, State.SUCCEEDED)
    yield equal("attempts, a day behind", ground.outcomes(runs), ["acked"])
    yield equal("attempts past a time limit there", ground.outcomes(hangs), ["timed_out", "acked"])


def _set_clock(ground: Ground, seconds: int) -> None:
    # In one step: a reader must not find the file empty.
    new = ground.directory / "offset"
    new.write_text(str(seconds))
    new.rename(ground.directory / CLOCK)
