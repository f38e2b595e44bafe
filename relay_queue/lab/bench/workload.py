"""What every family of figures is given, and what it does to the scratch projects it measures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

from django.db import Error, connection

from relay_queue import store
from relay_queue.lab import data, processes
from relay_queue.lab.processes import LabError
from relay_queue.lab.project import ScratchProject, Workers, counts, enqueue_many
from relay_queue.lab.server import Server
from relay_queue.lab.settings import SERVER_VARIABLE
from relay_queue.lab.tasks import noop
from relay_queue.models import Job, Lease
from relay_queue.states import Outcome, State

Number = TypeVar("Number", int, float)

QUEUE: Final = "default"
BATCH: Final = 20_000
STALL_SECONDS: Final = 120.0
PREFIX: Final = "relay_bench_"
FILE_IS_DURABLE: Final = {"synchronous": 2, "journal_mode": "wal"}
SERVER_IS_DURABLE: Final = {"synchronous_commit": "on", "fsync": "on"}
"""With other settings commits look faster than they are. 2 is FULL."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a family: what is wanted, how large, and where it may write.

    ``say`` shows one line of progress.
    """

    names: Collection[str]
    quick: bool
    folder: Path
    say: Callable[[str], None]

    def wants(self, *names: str) -> bool:
        """Say whether any of these figures is asked for."""
        return any(name in self.names for name in names)

    def size(self, full: Number, quick: Number) -> Number:
        """Return the size for this run."""
        return quick if self.quick else full

    def on_file(self, name: str) -> BenchProject:
        """Make a project with an empty database in a file, and use it in this process."""
        made = BenchProject(self.folder / name)
        made.directory.mkdir()
        made.use()
        made.migrate()
        _require_durable("scratch database", FILE_IS_DURABLE, "PRAGMA {}")
        return made

    @contextmanager
    def on_server(self) -> Iterator[BenchProject]:
        """Make a project with an empty database on the server, use it, and drop the database.

        Raises `LabError` if the server would not keep its commits, or lets us make no database.
        """
        name = f"{PREFIX}{uuid4().hex[:12]}"
        made = BenchProject(self.folder / name, name)
        made.directory.mkdir()
        with ExitStack() as stack:
            try:
                stack.enter_context(Server(server_entry()).database(name))
            except Error as error:
                hint = "The role needs CREATEDB: ALTER ROLE … CREATEDB."
                raise LabError(f"no scratch database: {error}. {hint}") from error
            stack.callback(connection.close)
            made.use()
            made.migrate()
            _require_durable("server", SERVER_IS_DURABLE, "SHOW {}")
            yield made


def server_entry() -> dict[str, Any]:
    """Return the settings of the server that is measured. Raises `LabError` if none is."""
    if SERVER_VARIABLE not in os.environ:
        raise LabError("this figure needs PostgreSQL; name its alias with --database")
    entry: dict[str, Any] = json.loads(os.environ[SERVER_VARIABLE])
    return entry


def server_address() -> dict[str, Any]:
    """Return what a bare driver needs to reach the database that is in use."""
    keys = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password"}
    given = {keys[key]: value for key, value in server_entry().items() if key in keys and value}
    return {**given, "dbname": connection.settings_dict["NAME"]}


def _require_durable(place: str, settings: Mapping[str, object], question: str) -> None:
    with connection.cursor() as cursor:
        for name, durable in settings.items():
            cursor.execute(question.format(name))
            value = cursor.fetchone()[0]
            if value != durable:
                raise LabError(
                    f"the {place} has {name}={value}; speeds are only measured with {durable}"
                )


class BenchProject(ScratchProject):
    """A scratch project with many equal jobs in one queue."""

    def enqueue_noops(self, jobs: int) -> None:
        """Enqueue jobs that do nothing, many in a commit."""
        for start in range(0, jobs, BATCH):
            enqueue_many([noop.bind()] * min(BATCH, jobs - start))

    def fill(self, **jobs: int) -> None:
        """Enqueue one job and fill the tables with copies, see `data.fill`."""
        self.enqueue_noops(1)
        data.fill(Job.objects.latest("pk").pk, **jobs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep workers from claiming while jobs are put in; let them go at the end of the block."""
        self.do(store.ensure_queue, QUEUE)
        self.do(store.pause, QUEUE)
        yield
        self.do(store.resume, QUEUE)

    def wait_finished(self, workers: Workers, pause: float = 0.05) -> None:
        """Wait until no job is ready or running, looking every ``pause`` seconds.

        Raises `LabError` if nothing moves any more.
        """
        left = count(State.READY, State.RUNNING)
        while left:
            before = left
            left = self.wait(
                f"a job of the {before:,} that are left",
                lambda: [n for n in [count(State.READY, State.RUNNING)] if n < before],  # noqa: B023
                seconds=STALL_SECONDS,
                pause=pause,
            )[0]
            workers.require_running()

    def run_noops(self, jobs: int, workers: Workers) -> None:
        """Enqueue jobs while the workers may not claim, and wait until they have run them."""
        with self.paused():
            self.enqueue_noops(jobs)
        self.wait_finished(workers)


def count(*states: State) -> int:
    """Return how many jobs are in these states, from the counters."""
    found = counts()
    return sum(found.get(state.value, 0) for state in states)


def acked_since(lease_id: int) -> list[datetime]:
    """Return when each lease after this one was acked, in order."""
    acked = Lease.objects.filter(id__gt=lease_id, outcome=Outcome.ACKED)
    ends = acked.order_by("ended_at").values_list("ended_at", flat=True)
    return [moment for moment in ends if moment is not None]


def seen(value: float | None) -> float:
    """Return what was seen of a process. Raises `LabError` if the system shows no such thing."""
    if value is None:
        raise LabError("this figure needs Linux and a living process")
    return value


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time that processes have used."""
    return sum(seen(processes.cpu_seconds(pid)) for pid in pids)
