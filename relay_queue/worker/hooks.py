"""Named points of a tick, at which a test or the drill may act: the seam for injected faults.

A worker that runs jobs for anybody has no hook. A point then costs one look at an empty dictionary,
a few times a tick and never for a job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

Point = Literal["begin", "settled", "renewed", "recovered", "promoted", "claimed", "committed"]
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
