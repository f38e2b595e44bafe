"""What every scene has at hand: the workers, the journal, the screen, and patience with an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

from django.core.management import call_command
from django.db.models import Sum

from relay_queue.cli.demo.screen import Screen
from relay_queue.models import Job, Lease, QueueCount
from relay_queue.scratch import journal, workers
from relay_queue.scratch.workers import Workers
from relay_queue.states import State

T = TypeVar("T")

PATIENCE_SECONDS: Final = 30.0
"""How long one thing may take to happen on a slow machine."""

POLL_SECONDS: Final = 0.01

PROCESSES: Final = 3
CONCURRENCY: Final = 2
OPTIONS: Final = (
    "--name=demo",
    f"--processes={PROCESSES}",
    f"--concurrency={CONCURRENCY}",
    "--shutdown-timeout=5",
)


class NotObserved(Exception):
    """Something that Relay promises did not happen."""


class Stage:
    """The demo while it runs. ``deadline`` is a reading of the monotonic clock."""

    def __init__(self, directory: Path, screen: Screen, deadline: float) -> None:
        self.directory = directory
        self.screen = screen
        self.workers = Workers(directory / "worker.log", *OPTIONS)
        self._deadline = deadline
        self._interrupted = False

    def interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Note a signal to stop, which the next `check` or `wait` heeds.

        Raised on the spot, it could break into the midst of a transaction. A terminal and the
        first process both send one, so there may be several.
        """
        self._interrupted = True

    def check(self, held: bool, claim: str, found: object = "") -> None:
        """Show a claim that held. Raises `NotObserved` with what was ``found`` if it did not."""
        self._heed()
        if not held:
            raise NotObserved(f"{claim}. Found: {found}" if found != "" else claim)
        self.screen.fact(claim)

    def wait(self, condition: Callable[[], T | None], what: str) -> T:
        """Poll until ``condition`` returns something true, and return that.

        Raises `NotObserved` when the time is over or the workers have ended.
        """
        end = min(time.monotonic() + PATIENCE_SECONDS, self._deadline)
        while not (value := condition()):
            self._heed()
            if (code := self.workers.ended()) is not None:
                raise NotObserved(f"the workers ended by themselves, with exit code {code}")
            if time.monotonic() > end:
                raise NotObserved(f"{what}: it did not happen in time")
            self.screen.pulse(counts)
            time.sleep(POLL_SECONDS)  # the audience sees each step, and the tables tell nobody
        return value

    def _heed(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def wait_for_state(self, job_ids: list[int], state: State) -> list[Job]:
        """Wait until all these jobs are in a state and return them in the order of their ids."""
        what = f"{len(job_ids)} jobs {state.value}"
        found = Job.objects.filter(pk__in=job_ids, state=state)
        self.wait(lambda: found.count() == len(job_ids), what)
        return list(found.order_by("pk"))

    def wait_for_run(self, job_id: int, attempt: int = 1) -> tuple[journal.Entry, Lease]:
        """Wait until a function has entered an attempt; return what it noted, and its lease."""

        def entry() -> journal.Entry | None:
            runs = journal.read(self.directory, job_id=job_id)
            return next((run for run in runs if run.attempt == attempt), None)

        run = self.wait(entry, f"attempt {attempt} of job {job_id} to run")
        lease = Lease.objects.select_related("worker").get(pk=run.epoch)
        if lease.worker is None or lease.worker.pid != run.pid:
            raise NotObserved(f"job {job_id} ran in process {run.pid}, not in {lease.worker}")
        return run, lease

    def freeze(self, pid: int) -> None:
        """Stop a worker, but not while it holds the writer: everybody else would wait for it."""
        try:
            workers.freeze(pid)
        except TimeoutError as never:
            raise NotObserved(str(never)) from never


def relay(*arguments: str) -> str:
    """Run a verb of ``manage.py relay`` and return what it printed."""
    printed = StringIO()
    call_command("relay", *arguments, stdout=printed, stderr=printed)
    return printed.getvalue()


def counts() -> dict[str, int]:
    """Return how many jobs are in each state, of those that any job is in."""
    rows = QueueCount.objects.values_list("state").annotate(Sum("n")).order_by()
    found = {state: n for state, n in rows if n}
    return {state.value: found[state.value] for state in State if state.value in found}


def ledger(job_id: int) -> list[Lease]:
    """Return the attempts of a job, the oldest first."""
    return list(Lease.objects.filter(job=job_id).select_related("worker").order_by("pk"))


def moment(at: datetime | None) -> str:
    """Return a time of day in UTC, to the millisecond."""
    return f"{at:%H:%M:%S.%f}"[:-3] if at else "-"
