"""What one tick is to do, and what it has committed. Plain values between the loop and the tick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from relay_queue.store.records import Claim, Recovered, Settled, Settlement
from relay_queue.store.workers import NewWorker
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.liveness import DeadWorkers
from relay_queue.worker.stats import Stats

SETTLE: Final = "store outcomes"
RENEW: Final = "renew leases"
RECOVER: Final = "recover jobs"
PROMOTE: Final = "wake jobs"
CLAIM: Final = "claim jobs"
COUNT: Final = "write statistics"
"""The steps of a tick, in the words of a log line. A service may have a step of its own."""


@dataclass(slots=True)
class Plan:
    """What one tick is to do.

    ``settlements`` is asked once the writer is won: what finished while the tick waited goes along
    in the same commit. ``places`` gives, at that moment, how many jobs to claim. ``due`` says that
    a job may be due or a lease over; most ticks need not ask. ``may_expire`` allows to end leases
    for being over. ``overdrawn`` gives, at that moment too, our leases that ran out while we waited
    for the writer, and the seconds of that wait. ``hindrance`` is what keeps the
    worker from its work, for others to read. ``registered`` and ``order`` are written again if
    somebody deletes the worker's row.
    """

    worker_id: int
    settlements: Callable[[], Sequence[Settlement]]
    places: Callable[[], int]
    queues: Sequence[str] = ()
    backends: Sequence[str] | None = None
    lease_seconds: float | None = None
    suspects: int = 1
    renew: Sequence[Attempt] = ()
    due: bool = True
    may_expire: bool = True
    dead: DeadWorkers = field(default_factory=DeadWorkers)
    stats: Stats | None = None
    hindrance: str = ""
    registered: NewWorker | None = None
    order: str = ""
    careful: bool = False
    overdrawn: Callable[[], tuple[Sequence[Attempt], float]] = lambda: ((), 0.0)


@dataclass(slots=True)
class Done:
    """What one tick has committed.

    ``moved`` counts the jobs that its services have sent on. ``tried`` are the services that had
    anything to do. ``faults`` has the error of each step that a careful tick left undone, though no
    row is to blame. A settlement without an answer was not stored, and is to be sent again.
    """

    now: datetime = field(init=False)
    settlements: Sequence[Settlement] = ()
    answers: list[Settled] = field(default_factory=list)
    renewed: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    recovered: list[Recovered] = field(default_factory=list)
    promoted: int = 0
    moved: int = 0
    asked: int = 0
    claims: list[Claim] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    faults: dict[str, Exception] = field(default_factory=dict)
