"""Recording a load, and what it was promised up to each point of the record."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from relay_queue.states import Outcome, State
from tests.conftest import Project
from tests.power import INIT_VARIABLE
from tests.power.disk import Record, read_record
from tests.power.shim import variables

STAMP = "A"
"""The kind of an entry that is no change of the disk: a promise was heard of."""

OUTCOMES = {
    "ack": Outcome.ACKED,
    "nack": Outcome.FAILED,
    "snooze": Outcome.SNOOZED,
    "release": Outcome.RELEASED,
}
"""How the lease ends for each verb of the load."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What happened to a database that held ``content`` at first."""

    database: Path
    content: bytes
    entries: list[Record]


class Recording(Project):
    """The project on a scratch file, each of whose writes goes into a record."""

    def __init__(self, database: Path, logs: Path, shim: Path, synchronous: str) -> None:
        super().__init__(database, logs)
        self.shim = shim
        # Short logs, so that the load sees many checkpoints, restarts and truncations of the log.
        self.init = (
            f"PRAGMA synchronous={synchronous}; PRAGMA wal_autocheckpoint=60; "
            "PRAGMA journal_size_limit=150000"
        )
        self.content = database.read_bytes()
        self.path = logs.with_name("record")

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process of this project."""
        return {
            **super().environment,
            **variables(self.shim, self.database),
            "RELAY_SHIM_RECORD": str(self.path),
            "DJANGO_SETTINGS_MODULE": "tests.power.settings",
            INIT_VARIABLE: self.init,
        }

    def play(self, rounds: int) -> Recorded:
        """Let a client and workers loose, twice, so that the log is deleted and made anew."""
        for half in range(2):
            client = self.part("client", str(half), str(rounds))
            workers = self.part("worker", "--processes=2", "--concurrency=4", "--drain")
            for process in (client, workers):
                assert process.wait(100) == 0, self.log(process)
        return Recorded(self.database, self.content, read_record(self.path))

    def part(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start one part of the load."""
        return self._start([sys.executable, "-m", "tests.power.load", *arguments], {})


@dataclass(slots=True)
class Promises:
    """What has been promised so far: these facts must be on every disk from now on."""

    jobs: set[int] = field(default_factory=set)
    leases: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)

    def note(self, record: Record) -> None:
        """Take a stamp into account."""
        said = json.loads(record.data)
        match said["what"]:
            case "enqueued":
                self.jobs.add(said["job"])
            case "cancelled":
                self.states[said["job"]] = State.CANCELLED
            case "claimed":
                self.leases[said["lease"]] = said["job"]
            case verb:
                self.outcomes[said["lease"]] = OUTCOMES[verb]
                if said["state"] in (State.SUCCEEDED, State.DEAD):
                    self.states[said["job"]] = said["state"]

    def broken(self, jobs: dict[int, str], leases: dict[int, tuple[int, str | None]]) -> list[str]:
        """Return what was promised and is not there. ``leases`` has job and outcome by id."""
        gone = [f"job {job} was enqueued" for job in self.jobs - jobs.keys()]
        gone += [
            f"lease {lease} of job {job} was granted"
            for lease, job in self.leases.items()
            if leases.get(lease, (0, None))[0] != job
        ]
        gone += [
            f"lease {lease} ended as {outcome}"
            for lease, outcome in self.outcomes.items()
            if leases.get(lease, (0, None))[1] != outcome
        ]
        gone += [
            f"job {job} became {state}"
            for job, state in self.states.items()
            if jobs.get(job) != state
        ]
        return gone

    def __len__(self) -> int:
        return sum(map(len, (self.jobs, self.leases, self.outcomes, self.states)))
