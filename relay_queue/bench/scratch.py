"""The scratch project seen from the process that measures: its database, workers and ledger."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from django.core.management import call_command
from django.db import connection
from django.db.models import Sum

from relay_queue import store
from relay_queue.backend import RelayBackend
from relay_queue.bench.measuring import BenchError, wait_for
from relay_queue.bench.tasks import noop
from relay_queue.compat import task_backends
from relay_queue.models import Lease, QueueCount, Worker
from relay_queue.states import Outcome, State
from relay_queue.wakeup import ring_on_commit

QUEUE = "default"
BATCH = 20_000
STOP_SECONDS = 20.0
START_SECONDS = 60.0
STALL_SECONDS = 120.0
FULL_SYNC = 2


def use(database: Path) -> None:
    """Make ``database``, a new file, the one that this process and its workers use."""
    connection.close()
    os.environ["RELAY_BENCH_DB"] = str(database)
    connection.settings_dict["NAME"] = str(database)
    call_command("migrate", verbosity=0)
    _require_durable()


def switch(database: Path) -> None:
    """Go on with a database that `use` has made before."""
    connection.close()
    connection.settings_dict["NAME"] = str(database)


def _require_durable() -> None:
    with connection.cursor() as cursor:
        sync = cursor.execute("PRAGMA synchronous").fetchone()[0]
        journal = cursor.execute("PRAGMA journal_mode").fetchone()[0]
    if (sync, journal) != (FULL_SYNC, "wal"):
        raise BenchError(
            f"the scratch database has synchronous={sync} and journal_mode={journal}; "
            "speeds are only measured with 2 (FULL) and wal"
        )


def enqueue(jobs: int) -> None:
    """Enqueue no-op jobs through the public API, many in a commit."""
    backend = task_backends["default"]
    assert isinstance(backend, RelayBackend)
    for start in range(0, jobs, BATCH):
        backend.enqueue_many([(noop, (), {})] * min(BATCH, jobs - start))


@contextmanager
def paused() -> Iterator[None]:
    """Keep workers from claiming while jobs are put in; let them go at the end of the block."""
    with store.transaction() as tx:
        store.ensure_queue(tx, QUEUE)
        store.pause(tx, QUEUE)
    yield
    with store.transaction() as tx:
        store.resume(tx, QUEUE)
    ring_on_commit("default")


def count(*states: State) -> int:
    """Return how many jobs are in these states, from the counters."""
    total = QueueCount.objects.filter(state__in=states).aggregate(total=Sum("n"))["total"]
    return int(total or 0)


def wait_finished(fleet: Fleet, pause: float = 0.05) -> None:
    """Wait until no job is ready or running, looking every ``pause`` seconds.

    Raises `BenchError` if nothing moves any more.
    """
    left = count(State.READY, State.RUNNING)
    while left:
        before = left
        left = wait_for(
            f"a job of the {before:,} that are left",
            lambda: [n for n in [count(State.READY, State.RUNNING)] if n < before],  # noqa: B023
            seconds=STALL_SECONDS,
            pause=pause,
        )[0]
        fleet.require_running()


def acked_since(lease_id: int) -> list[datetime]:
    """Return when each lease after this one was acked, in order."""
    acked = Lease.objects.filter(id__gt=lease_id, outcome=Outcome.ACKED)
    ends = acked.order_by("ended_at").values_list("ended_at", flat=True)
    return [moment for moment in ends if moment is not None]


def last_lease() -> int:
    """Return the id of the newest lease, or 0."""
    return Lease.objects.order_by("-id").values_list("id", flat=True).first() or 0


class Fleet:
    """Workers started by the real ``runworker``; use it as a context manager.

    Entering waits until all of them are registered, leaving stops them.
    """

    def __init__(self, processes: int, concurrency: int) -> None:
        """Plan ``processes`` workers with ``concurrency`` slots each."""
        self.processes = processes
        self.concurrency = concurrency
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Fleet:
        numbers = ["--processes", str(self.processes), "--concurrency", str(self.concurrency)]
        self._log = Path(f"workers-{uuid4().hex[:8]}.log").absolute().open("ab")
        self._process = subprocess.Popen(
            [*django_command("runworker"), *numbers, "--shutdown-timeout", "5"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            wait_for("the start of the workers", self._all_started, seconds=START_SECONDS)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def pids(self) -> list[int]:
        """Return the process ids of the workers that are registered."""
        alive = Worker.objects.filter(stopped_at=None)
        return list(alive.order_by("id").values_list("pid", flat=True))

    def require_running(self) -> None:
        """Raise `BenchError` with the end of the log if the workers have ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            tail = Path(self._log.name).read_text(errors="replace")[-2000:]
            raise BenchError(f"the workers ended with exit code {code}:\n{tail}")

    def _all_started(self) -> bool:
        self.require_running()
        return len(self.pids()) >= self.processes

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                # Its workers see the end of their line to it and leave by themselves.
                self._process.kill()
                self._process.wait()
        self._log.close()


def django_command(*arguments: str) -> Sequence[str]:
    """Return the command line of a management command of the scratch project."""
    return [sys.executable, "-m", "django", *arguments]
