"""Which function executes which row, and how one is played from start to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from relay_queue.drill import clocks, damage, deaths, latecomers, pressure
from relay_queue.drill.ground import Ground, NotSeen
from relay_queue.drill.observation import Observation, equal
from relay_queue.drill.result import Result
from relay_queue.store.verify import verify
from relay_queue.wakeup.files import database_path

Row = Callable[[Ground], Iterator[Observation]]

ROWS: Final[dict[str, Row]] = {
    "F1": deaths.before_the_effect,
    "F2": deaths.after_the_effect,
    "F3": latecomers.after_expiry,
    "F4": latecomers.after_another_claim,
    "F5": deaths.inside_a_transaction,
    "F6": deaths.all_at_once,
    "F7": pressure.failing,
    "F8": pressure.flood,
    "F9": latecomers.past_the_timeout,
    "F10": latecomers.after_cancel,
    "F11": pressure.stopping,
    "F12": damage.altered_payload,
    "F13": damage.torn_and_flipped,
    "F14": damage.no_room_and_no_lock,
    "F15": clocks.jumping_clock,
}
"""The functions, by the number of the row."""

DAMAGED: Final = frozenset({"F12", "F13"})
"""Rows that leave a database which ``relay verify`` rightly condemns."""


def play(name: str, directory: Path) -> Result:
    """Execute one row in an empty folder and database, where nothing of it runs afterwards."""
    began = time.monotonic()
    ground = Ground(directory)
    observed: list[Observation] = []
    fault = ""
    try:
        for observation in ROWS[name](ground):
            observed.append(observation)
        ground.stop_workers()
        if name not in DAMAGED:
            kinds = sorted({fault.kind for fault in verify(database_path("default")).faults})
            observed.append(equal("relay verify", kinds or "no fault", "no fault"))
    except NotSeen as missing:
        fault = str(missing)
    finally:
        ground.close()
    log = [] if not fault and all(o.held for o in observed) else ground.last_words()
    return Result(name, observed, fault, time.monotonic() - began, log)
