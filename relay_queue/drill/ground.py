"""The ground of one row: its scratch database, its workers, and patience with an end.

It waits by looking at the tables and the journal, and reads from them what a row observes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from django.core.management import call_command
from django.db import connection

from relay_queue import store
from relay_queue.drill import faults, tasks
from relay_queue.drill.means import means_for
from relay_queue.drill.settings import VARIABLE
from relay_queue.models import Job, Lease, Worker
from relay_queue.scratch import journal, workers
from relay_queue.scratch.journal import Entry
from relay_queue.scratch.workers import DJANGO, Workers
from relay_queue.states import State
from relay_queue.wakeup import ring_on_commit

T = TypeVar("T")

PATIENCE_SECONDS: Final = 30.0
"""How long one thing may take to happen on a slow machine."""

MOST_SECONDS: Final = 80.0
"""How long a row may take in all."""

LOOK_SECONDS: Final = 0.02


class NotSeen(Exception):
    """Something that was waited for did not happen."""


class Ground:
    """A scratch project in ``directory``, on the connection of this process.

    ``means`` are what can be done to its database from outside.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._deadline = time.monotonic() + MOST_SECONDS
        self._started: list[Workers] = []
        self.means = means_for(directory)
        call_command("migrate", verbosity=0, interactive=False)

    # -- doing

    def work(
        self, *arguments: str, processes: int = 1, concurrency: int = 4, fault: str = ""
    ) -> Workers:
        """Start workers, prepared with a fault of `faults` if one is named, until all are ready."""
        program = ["-m", faults.__name__, fault, str(self.directory)] if fault else DJANGO
        numbers = (f"--processes={processes}", f"--concurrency={concurrency}")
        known = Worker.objects.count()
        started = Workers(
            self.directory / f"workers-{len(self._started)}.log",
            *numbers,
            *arguments,
            program=program,
        )
        self._started.append(started)
        started.start()
        self.wait(lambda: Worker.objects.count() >= known + processes, "the start of the workers")
        return started

    def enqueue(self, task: Any, *arguments: Any, **options: Any) -> int:
        """Enqueue through the public API and return the id of the job."""
        call = task.using(**options) if options else task
        return int(call.enqueue(*arguments).id)

    def make(self, name: str) -> None:
        """Make a file that functions or faults wait for."""
        (self.directory / name).touch()

    def remove(self, name: str) -> None:
        """Remove such a file."""
        (self.directory / name).unlink()

    def do(self, verb: Callable[..., T], *arguments: Any) -> T:
        """Run a verb of the store in a transaction of its own, and ring like the commands do."""
        with store.transaction() as tx:
            ring_on_commit("default")
            return verb(tx, *arguments)

    def run(self, *command: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a management command as a process, in a copy of the scratch project if one is given."""
        place = directory or self.directory
        return subprocess.run(
            [sys.executable, *DJANGO, *command],
            env={**os.environ, VARIABLE: str(place)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    @contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """Keep a process from running during a block, as a frozen machine does."""
        workers.freeze(pid)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # -- waiting

    def wait(self, condition: Callable[[], T | None], what: str) -> T:
        """Look until ``condition`` returns something true. Raises `NotSeen` after a while."""
        end = min(time.monotonic() + PATIENCE_SECONDS, self._deadline)
        while not (value := condition()):
            if time.monotonic() > end:
                raise NotSeen(f"{what} did not happen in time")
            time.sleep(LOOK_SECONDS)  # other processes make it happen; they tell nobody
        return value

    def wait_run(self, job_id: int, attempt: int = 1, event: str = tasks.BEGAN) -> Entry:
        """Wait until an attempt has said something in the journal."""
        return self.wait(
            lambda: next((r for r in self.runs(job_id, event) if r.attempt == attempt), None),
            f"{event!r} of attempt {attempt} of job {job_id}",
        )

    def wait_state(self, job_id: int, state: State) -> Job:
        """Wait until a job is in a state."""
        return self.wait(
            lambda: Job.objects.filter(pk=job_id, state=state).first(),
            f"job {job_id} {state.value}",
        )

    def wait_refused(self, job_id: int, attempt: int = 1) -> Lease:
        """Wait until a late return is recorded on an attempt."""
        leases = Lease.objects.filter(job=job_id, attempt=attempt, refused_at__isnull=False)
        return self.wait(leases.first, f"the refusal of attempt {attempt} of job {job_id}")

    # -- observing

    def job(self, job_id: int) -> Job:
        """Read a job."""
        return Job.objects.get(pk=job_id)

    def ledger(self, job_id: int) -> list[Lease]:
        """Read the attempts of a job, oldest first."""
        return list(Lease.objects.filter(job=job_id).order_by("pk"))

    def outcomes(self, job_id: int) -> list[str]:
        """Return how the attempts of a job ended, oldest first."""
        return [lease.outcome or "open" for lease in self.ledger(job_id)]

    def runs(self, job_id: int, event: str = tasks.BEGAN) -> list[Entry]:
        """Return what the attempts of a job have said, in the order in which they did."""
        return journal.read(self.directory, event, job_id)

    def columns(self, job_id: int) -> dict[str, object]:
        """Return all columns of a job."""
        return dict(Job.objects.filter(pk=job_id).values().get())

    def pids(self) -> list[int]:
        """Return the processes of the workers that have not been seen to end, oldest first."""
        return [worker.pid for worker in workers.alive()]

    # -- ending

    def stop_workers(self) -> None:
        """End all workers."""
        for started in reversed(self._started):
            started.close()

    def last_words(self) -> list[str]:
        """Return the ends of all logs."""
        return [line for started in self._started for line in started.last_words()]

    def close(self) -> None:
        """End all workers and let the database go."""
        self.stop_workers()
        connection.close()


def changed(before: dict[str, object], after: dict[str, object]) -> Sequence[str]:
    """Return the names of the columns that differ."""
    return [name for name in before if before[name] != after[name]]


def is_over(lease: Lease) -> bool:
    """Say whether the time of a lease has passed, by the clock that leases follow."""
    return lease.expires_at < store.inspect.now()
