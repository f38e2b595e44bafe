"""What one tick is to do, what it has committed, and the named points on its way.

Plain values between the loop and the tick. At a point a test or the drill may act: the seam for
injected faults. A worker that runs jobs for anybody has no hook. A point then costs one look at an
empty dictionary, a few times a tick and never for a job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from relay_queue.store.records import Claim, Recovered, Settled, Settlement
from relay_queue.store.workers import NewWorker
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.liveness import DeadWorkers
from relay_queue.worker.stats import Stats

SETTLE: Final = "store outcomes"
RENEW: Final = "renew leases"
RECOVER: Final = "recover jobs"
PROMOTE: Final = "wake jobs"
FIRE: Final = "fire schedules"
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


Point = Literal[
    "begin", "settled", "renewed", "recovered", "promoted", "fired", "claimed", "committed"
]
"""The steps of a tick, in their order.

``begin`` comes before the transaction, and ``committed`` after it; all others are inside. A hook of
``begin`` gets the plan of the tick, every other hook gets what the tick has done so far.
"""

HOOKS: Final[dict[Point, Callable[[Any], None]]] = {}
"""What is to be called at a point. What a hook raises is raised by the tick."""


def reach(point: Point, facts: object) -> None:
    """Call the hook of a point, if there is one."""
    if HOOKS and (hook := HOOKS.get(point)) is not None:
        hook(facts)
