"""A project with real workers on the test database, and honest looks at what became of its jobs."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from django.db import connection

from relay_queue import store
from relay_queue.lab.project import freeze
from relay_queue.models import Job, Lease, Worker
from tests.conftest import Project, wait_until
from tests.process import settings as process_settings

T = TypeVar("T")

on_each_engine = pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
"""The test runs once on each engine: it says something that may differ between them."""

on_postgresql = pytest.mark.parametrize("engine", ["postgresql"])

SHORT_SECONDS = 1.0
"""A time limit to be exceeded by the first attempt, and long for one that ends by itself."""

LOOK_SECONDS = 0.03
"""Between two looks at the tables while a test waits: the workers need the processor more."""


class Run(NamedTuple):
    """One line of the side-effect file."""

    job_id: int
    epoch: int
    attempt: int
    pid: int
    word: str


class Farm(Project):
    """The project on the test database itself, with a side-effect file for its jobs.

    The test enqueues by itself; only workers are processes of their own.
    """

    def __init__(self, database: Path | str, directory: Path) -> None:
        super().__init__(database, directory / "logs")
        self.directory = directory
        self.effects = str(directory / "effects")
        self.relay: dict[str, Any] = {"POLL_SECONDS": 300, "SHUTDOWN_TIMEOUT_SECONDS": 1}
        """Settings of the workers. Nothing is found by looking now and then, unless a test says so."""
        self.variables: dict[str, str] = {}
        """What else the environment of the workers has."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process of this project."""
        return {
            **super().environment,
            "DJANGO_SETTINGS_MODULE": process_settings.__name__,
            process_settings.RELAY_VARIABLE: json.dumps(self.relay),
            **self.variables,
        }

    def work(
        self, *arguments: str, concurrency: int = 4, processes: int = 1, lease: float | None = None
    ) -> subprocess.Popen[bytes]:
        """Start workers and wait until all of them have registered."""
        command = self.command(concurrency, processes, lease)
        return self._registered(processes, lambda: self.spawn(*command, *arguments))

    def run_module(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``python -m module`` in the background, as a process of this project."""
        return self._start([sys.executable, "-m", module, *arguments], {})

    def drive(
        self,
        preparation: str,
        argument: str,
        *arguments: str,
        concurrency: int = 4,
        processes: int = 1,
    ) -> subprocess.Popen[bytes]:
        """Start workers whose process was prepared by a function of ``driver.py``."""
        command = [preparation, argument, *self.command(concurrency, processes), *arguments]
        return self._registered(
            processes, lambda: self.run_module("tests.process.driver", *command)
        )

    def _registered(
        self, processes: int, start: Callable[[], subprocess.Popen[bytes]]
    ) -> subprocess.Popen[bytes]:
        known = Worker.objects.order_by("-id").values_list("id", flat=True).first() or 0
        process = start()
        wait_until(
            lambda: (
                Worker.objects.filter(id__gt=known).count() >= processes
                or process.poll() is not None
            ),
            message=lambda: self.log(process),
            interval=LOOK_SECONDS,
        )
        return process

    @staticmethod
    def command(concurrency: int = 4, processes: int = 1, lease: float | None = None) -> list[str]:
        """Return the arguments of ``manage.py`` that start workers."""
        command = ["runworker", f"--concurrency={concurrency}", f"--processes={processes}"]
        return command if lease is None else [*command, f"--lease-seconds={lease}"]

    def workers(self) -> list[int]:
        """Return the process ids of the workers that have not been seen to end, oldest first."""
        return list(
            Worker.objects.filter(stopped_at=None).order_by("id").values_list("pid", flat=True)
        )

    def wait_told(self, supervisor: subprocess.Popen[bytes]) -> None:
        """Wait until a supervisor has passed on the order to stop: its workers can read it."""
        wait_until(
            lambda: "Stopping: workers have" in self.log(supervisor),
            message=lambda: self.log(supervisor),
        )

    def worker(self) -> int:
        """Return the process id of the only worker."""
        (pid,) = self.workers()
        return pid

    @staticmethod
    def do(verb: Callable[..., T], *arguments: Any) -> T:
        """Run a verb of the store in a transaction of its own."""
        with store.transaction() as tx:
            return verb(tx, *arguments)

    def enqueue(self, chore: Any, *arguments: Any, **options: Any) -> int:
        """Enqueue a chore, with the side-effect file first, and return the id of its job."""
        task = chore.using(**options) if options else chore
        return int(task.enqueue(self.effects, *arguments).id)

    def file(self, name: str) -> str:
        """Return the path of a file that a chore waits for."""
        return str(self.directory / name)

    def make(self, name: str) -> None:
        """Let the chores go on that wait for this file."""
        (self.directory / name).touch()

    def runs(self, job_id: int | None = None, word: str | None = None) -> list[Run]:
        """Return what the side-effect file holds, of one job and with one word if given."""
        try:
            lines = Path(self.effects).read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            *numbers, said = line.split()
            found.append(Run(*map(int, numbers), said))
        return [run for run in found if job_id in (None, run.job_id) and word in (None, run.word)]

    def wait_runs(self, job_id: int, count: int = 1, word: str | None = None) -> list[Run]:
        """Wait until a job has left so many lines."""
        wait_until(
            lambda: len(self.runs(job_id, word)) >= count, message=lambda: self.story(job_id)
        )
        return self.runs(job_id, word)

    def job(self, job_id: int) -> Job:
        """Read a job."""
        return Job.objects.get(pk=job_id)

    def leases(self, job_id: int) -> list[Lease]:
        """Read the ledger of a job, oldest lease first."""
        return list(Lease.objects.filter(job_id=job_id).order_by("id"))

    def outcomes(self, job_id: int) -> list[str | None]:
        """Return how the leases of a job ended, oldest first; None is an open one."""
        return [lease.outcome for lease in self.leases(job_id)]

    def wait_state(self, job_id: int, *states: str) -> Job:
        """Wait until a job is in one of these states."""
        wait_until(
            lambda: self.job(job_id).state in states,
            message=lambda: self.story(job_id),
            interval=LOOK_SECONDS,
        )
        return self.job(job_id)

    def wait_refused(self, lease_id: int) -> Lease:
        """Wait until a late return has been refused and recorded on its lease."""
        wait_until(
            lambda: Lease.objects.filter(pk=lease_id, refused_at__isnull=False).exists(),
            message=lambda: self.story(Lease.objects.get(pk=lease_id).job_id),
            interval=LOOK_SECONDS,
        )
        return Lease.objects.get(pk=lease_id)

    def wait_logged(self, process: subprocess.Popen[bytes], text: str) -> None:
        """Wait until a process has written a line: a thread of its own writes, a moment later."""
        wait_until(lambda: text in self.log(process), message=lambda: self.log(process))

    def wait_finished(self, timeout: float = 90) -> None:
        """Wait until every job is in a terminal state."""
        unfinished = Job.objects.filter(finished_at=None)
        wait_until(lambda: not unfinished.exists(), timeout, self.everything, LOOK_SECONDS)

    def story(self, job_id: int) -> str:
        """Tell all that is known of a job, for the message of a failed test."""
        lines = [str(Job.objects.filter(pk=job_id).values().first())]
        lines += [str(row) for row in Lease.objects.filter(job_id=job_id).order_by("id").values()]
        return "\n".join([*lines, *map(str, self.runs(job_id)), self.everything()])

    def everything(self) -> str:
        """Tell what the processes said and which jobs are unfinished."""
        left = list(Job.objects.filter(finished_at=None).values_list("id", "state")[:20])
        logs = [self.log(process) for process in self._spawned]
        return "\n".join([f"unfinished: {left}", *logs])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a worker from running, as a debugger or a frozen machine does.

    Not while it holds the writer: who stops then is ended, which is another test.
    """
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def writer_taken(farm: Farm) -> Iterator[None]:
    """Hold SQLite's write lock as a program does that knows nothing of the gate.

    On a server, a lock on the leases, which leaves others the reading.
    """
    if connection.vendor == "postgresql":
        with closing(connection.copy()) as locking, locking.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(f"LOCK TABLE {Lease._meta.db_table} IN EXCLUSIVE MODE")
            yield
        return
    with closing(sqlite3.connect(farm.database, isolation_level=None, timeout=30)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended; one that waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends while we read
        return False


def threads(pid: int) -> int:
    """Return how many threads a process has."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
