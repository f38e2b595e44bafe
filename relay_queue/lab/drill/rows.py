"""Which function executes which row, and how one is executed from start to end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Final

from django.db import Error

from relay_queue.db.filename import database_path
from relay_queue.lab.drill import damage, deaths, late_acks, pressure
from relay_queue.lab.drill.results import Observation, Result, equal
from relay_queue.lab.processes import LabError
from relay_queue.lab.project import ScratchProject
from relay_queue.lab.server import Server
from relay_queue.lab.settings import DATABASE_VARIABLE, SERVER_VARIABLE
from relay_queue.query.verify import verify

MOST_SECONDS: Final = 80.0
"""How long a row may take in all."""

Row = Callable[[ScratchProject], Iterator[Observation]]

ROWS: Final[dict[str, Row]] = {
    "F1": deaths.before_the_effect,
    "F2": deaths.after_the_effect,
    "F3": late_acks.after_expiry,
    "F4": late_acks.after_another_claim,
    "F5": deaths.inside_a_transaction,
    "F6": deaths.all_at_once,
    "F7": pressure.failing,
    "F8": pressure.flood,
    "F9": late_acks.past_the_timeout,
    "F10": late_acks.after_cancel,
    "F11": pressure.stopping,
    "F12": damage.altered_payload,
    "F13": damage.torn_and_flipped,
    "F14": damage.no_room_and_no_lock,
    "F15": late_acks.jumping_clock,
}
"""The functions, by the number of the row."""

DAMAGED: Final = frozenset({"F12", "F13"})
"""Rows that leave a database which ``relay verify`` rightly condemns."""


def run(name: str, directory: Path) -> None:
    """Execute a row in the scratch project of this process, and write what came of it as JSON."""
    with ExitStack() as stack:
        try:
            stack.enter_context(_database())
        except Error as error:
            said = " ".join(str(error).split())
            result = Result(name, fault=f"no scratch database: {said}")
        else:
            result = play(name, directory)
    sys.stdout.write(json.dumps(result.as_data()) + "\n")
    sys.stdout.flush()


def _database() -> AbstractContextManager[None]:
    """Make the database of the row where it is not a file, and drop it at the end."""
    server = os.environ.get(SERVER_VARIABLE)
    if server is None:
        return nullcontext()
    return Server.of_json(server).database(os.environ[DATABASE_VARIABLE])


def play(name: str, directory: Path) -> Result:
    """Execute one row in an empty folder and database, where nothing of it runs afterwards."""
    began = time.monotonic()
    project = ScratchProject(directory, most_seconds=MOST_SECONDS)
    observed: list[Observation] = []
    fault = ""
    try:
        project.migrate()
        for observation in ROWS[name](project):
            observed.append(observation)
        project.stop_workers()
        if name not in DAMAGED:
            kinds = sorted({fault.kind for fault in verify(database_path("default")).faults})
            observed.append(equal("relay verify", kinds or "no fault", "no fault"))
    except LabError as missing:
        fault = str(missing)
    finally:
        project.close()
    log = [] if not fault and all(o.held for o in observed) else project.last_words()
    return Result(name, observed, fault, time.monotonic() - began, log)
