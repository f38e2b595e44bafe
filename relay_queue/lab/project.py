"""A scratch project: a folder with its database, the workers in it, and what its functions noted.

The journal is the outside world of the functions: the tables say what should have run, the journal
says what did.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from django.core.management import call_command
from django.db import OperationalError, connection
from django.db.models import Sum

import relay_queue
from relay_queue import store
from relay_queue.backend import RelayBackend
from relay_queue.compat import task_backends
from relay_queue.context import JobContext
from relay_queue.lab import faults
from relay_queue.lab.processes import LabError, wait_for
from relay_queue.lab.server import Server
from relay_queue.lab.settings import (
    DATABASE,
    DATABASE_VARIABLE,
    DIRECTORY_VARIABLE,
    SERVER_VARIABLE,
    USE_VARIABLE,
)
from relay_queue.models import Job, Lease, QueueCount, Worker
from relay_queue.query import looks
from relay_queue.states import State
from relay_queue.task import Call
from relay_queue.wakeup import ring_on_commit
from relay_queue.worker.options import QUIT
from relay_queue.worker.reload import PARENT_OPTION

T = TypeVar("T")

SETTINGS: Final = "relay_queue.lab.settings"

START_SECONDS: Final = 60.0
PATIENCE_SECONDS: Final = 30.0
"""How long one thing may take to happen on a slow machine."""

STOP_SECONDS: Final = 15.0
QUIT_SECONDS: Final = 3.0
WRITABLE_SECONDS: Final = 0.3
MOST_TRIES: Final = 100
"""To find a worker without the writer: under load another process may keep it for so long."""

DJANGO: Final = ("-m", "django")

BEGAN: Final = "began"
ENDED: Final = "ended"
TOLD: Final = "told to stop"


def variables(
    use: str, directory: Path, server: Server | None = None, database: str = ""
) -> dict[str, str]:
    """Return the variables of the environment that put a process into a scratch project.

    ``use`` is what the project is for, see `settings`; ``database`` is its database on the server.
    """
    # A process finds this package from any directory.
    path = [str(Path(relay_queue.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]
    found = {
        "DJANGO_SETTINGS_MODULE": SETTINGS,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        USE_VARIABLE: use,
        DIRECTORY_VARIABLE: str(directory),
    }
    if server is not None:
        found |= {SERVER_VARIABLE: server.as_json(), DATABASE_VARIABLE: database}
    return found


# -- the journal


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. ``at`` is a reading of the monotonic clock, which processes of a host share."""

    event: str
    job_id: int
    attempt: int
    epoch: int
    pid: int
    at: float


def note(event: str, job: JobContext) -> None:
    """Append a line to the journal of the project that this process is in."""
    entry = Entry(event, job.job_id, job.attempt, job.epoch, os.getpid(), time.monotonic())
    path = _journal(Path(os.environ[DIRECTORY_VARIABLE]))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        # One small write to a file opened for appending is never torn by another.
        os.write(descriptor, f"{json.dumps(asdict(entry))}\n".encode())
    finally:
        os.close(descriptor)


def _journal(directory: Path) -> Path:
    return directory / "journal"


# -- workers


class Workers:
    """One supervisor and its workers, in a process group of their own, logging to a file.

    The supervisor holds one end of a socket: should this process be killed, it stops by itself. As a
    context manager they stop politely at the end of the block.
    """

    def __init__(self, log: Path, *arguments: str, program: Sequence[str] = DJANGO) -> None:
        """Start ``runworker``; ``program`` is what Python runs in place of Django's command line."""
        self.log = log
        self._line, theirs = socket.socketpair()
        with theirs, log.open("ab") as file:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *program, "runworker", *arguments),
                    *(PARENT_OPTION, str(theirs.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # Ctrl-C in the terminal is for the command, which then stops them itself.
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell_to_stop()
        self.wait()
        self.close()

    def require_running(self) -> None:
        """Raise `LabError` with the end of the log if the supervisor has ended."""
        code = self._process.poll()
        if code is not None:
            said = "\n".join(self.last_words())
            raise LabError(f"the workers ended by themselves, with exit code {code}:\n{said}")

    def tell_to_stop(self) -> None:
        """Ask them politely, as an init system does."""
        self._process.terminate()

    def wait(self) -> int | None:
        """Wait for the supervisor's end. Returns its exit code, None if it did not come in time."""
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the supervisor and its workers at once, as the end of a machine does."""
        self._signal_group(signal.SIGKILL)
        self._process.wait()

    def said(self) -> str:
        """Return their log."""
        return self.log.read_text(errors="replace")

    def last_words(self, lines: int = 12) -> list[str]:
        """Return the end of their log."""
        return self.said().splitlines()[-lines:]

    def close(self) -> None:
        """End whatever is left: at once, and by force if that does not help."""
        if self._line.fileno() < 0:
            return  # closed before: the number of its group may be another's by now
        # A process that is stopped can neither hear nor end.
        self._signal_group(signal.SIGCONT)
        with self._line, suppress(OSError):
            self._line.send(QUIT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_SECONDS)
        self._signal_group(signal.SIGKILL)
        self._process.wait()

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def alive() -> list[Worker]:
    """Return the workers that have registered and not been seen to end, oldest first."""
    return list(Worker.objects.filter(stopped_at__isnull=True).order_by("id"))


def freeze(pid: int) -> None:
    """Stop a worker, but not while it holds the writer, or rows: everybody else would wait for it.

    Raises `LabError` if it never lets them go.
    """
    for _ in range(MOST_TRIES):
        os.kill(pid, signal.SIGSTOP)
        try:
            with store.transaction(wait_seconds=WRITABLE_SECONDS) as tx:
                store.lock_lease_table(tx)
                return
        except OperationalError:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)  # time for the process to let the writer go
    raise LabError(f"process {pid} never let the writer go")


# -- the project


class ScratchProject:
    """A scratch project in ``directory``, on the connection of this process.

    ``database`` is the one on the server, if the project is on a server. The project waits by looking
    at the tables and the journal, for ``most_seconds`` in all.
    """

    def __init__(
        self, directory: Path, database: str = "", *, most_seconds: float = math.inf
    ) -> None:
        self.directory = directory
        self.file = directory / DATABASE
        self._database = database
        self._deadline = time.monotonic() + most_seconds
        self._started: list[Workers] = []

    # -- doing

    def use(self) -> None:
        """Make this the project of this process and of what it starts from now on."""
        connection.close()
        os.environ[DIRECTORY_VARIABLE] = str(self.directory)
        os.environ[DATABASE_VARIABLE] = self._database
        connection.settings_dict["NAME"] = self._database or str(self.file)

    def migrate(self) -> None:
        """Make the tables."""
        call_command("migrate", verbosity=0, interactive=False)

    def work(
        self, *arguments: str, processes: int = 1, concurrency: int = 4, fault: str = ""
    ) -> Workers:
        """Start workers, prepared with a fault of `faults` if one is named, until all are ready."""
        program = ["-m", faults.__name__, fault, str(self.directory)] if fault else DJANGO
        known = Worker.objects.count()
        started = Workers(
            self.directory / f"workers-{len(self._started)}.log",
            f"--processes={processes}",
            f"--concurrency={concurrency}",
            *arguments,
            program=program,
        )
        self._started.append(started)

        def ready() -> bool:
            started.require_running()
            return Worker.objects.count() >= known + processes

        self.wait("the start of the workers", ready, seconds=START_SECONDS)
        return started

    def enqueue(self, task: Any, *arguments: Any, **options: Any) -> int:
        """Enqueue through the public API and return the id of the job."""
        call = task.using(**options) if options else task
        return int(call.enqueue(*arguments).id)

    def make(self, name: str) -> None:
        """Make a file that functions or faults wait for."""
        (self.directory / name).touch()

    def do(self, verb: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run a verb of the store in a transaction of its own, and ring like the commands do."""
        with store.transaction() as tx:
            ring_on_commit("default")
            return verb(tx, *arguments, **options)

    def run(self, *command: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a management command as a process, in a copy of the project's folder if one is given."""
        return subprocess.run(
            [sys.executable, *DJANGO, *command],
            env={**os.environ, DIRECTORY_VARIABLE: str(directory or self.directory)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    @contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """Keep a process from running during a block, as a frozen machine does."""
        freeze(pid)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # -- waiting

    def wait(
        self,
        what: str,
        look: Callable[[], T | None],
        *,
        seconds: float | None = None,
        **options: Any,
    ) -> T:
        """Look until there is something, and return it. Raises `LabError` like `wait_for`."""
        left = max(0.0, self._deadline - time.monotonic())
        most = PATIENCE_SECONDS if seconds is None else seconds
        return wait_for(what, look, seconds=min(most, left), heed=self.heed, **options)

    def heed(self) -> None:
        """Do something else at each look of a wait. It may raise to end the wait."""

    def wait_run(
        self, job_id: int, attempt: int = 1, event: str = BEGAN, seconds: float | None = None
    ) -> Entry:
        """Wait until an attempt has noted something in the journal."""
        return self.wait(
            f"{event!r} of attempt {attempt} of job {job_id}",
            lambda: next((r for r in self.runs(job_id, event) if r.attempt == attempt), None),
            seconds=seconds,
        )

    def wait_state(self, job_id: int, state: State) -> Job:
        """Wait until a job is in a state."""
        return self.wait_states([job_id], state)[0]

    def wait_states(self, job_ids: Sequence[int], state: State) -> list[Job]:
        """Wait until all these jobs are in a state; return them in the order of their ids."""
        found = Job.objects.filter(pk__in=job_ids, state=state)
        named = f"job {job_ids[0]}" if len(job_ids) == 1 else f"{len(job_ids)} jobs"
        self.wait(f"{named} {state.value}", lambda: found.count() == len(job_ids))
        return list(found.order_by("pk"))

    def wait_refused(self, job_id: int, attempt: int = 1) -> Lease:
        """Wait until a late return is recorded on an attempt."""
        leases = Lease.objects.filter(job=job_id, attempt=attempt, refused_at__isnull=False)
        return self.wait(f"the refusal of attempt {attempt} of job {job_id}", leases.first)

    def wait_expiry(self, job_id: int) -> None:
        """Wait until the time of the first attempt is over, by the clock that leases follow."""
        lease = self.ledger(job_id)[0]
        self.wait("the end of the lease", lambda: lease.expires_at < looks.now())

    # -- observing

    def job(self, job_id: int) -> Job:
        """Read a job."""
        return Job.objects.get(pk=job_id)

    def ledger(self, job_id: int) -> list[Lease]:
        """Read the attempts of a job, oldest first."""
        return list(Lease.objects.filter(job=job_id).select_related("worker").order_by("pk"))

    def outcomes(self, job_id: int) -> list[str]:
        """Return how the attempts of a job ended, oldest first."""
        return [lease.outcome or "open" for lease in self.ledger(job_id)]

    def runs(self, job_id: int | None = None, event: str = BEGAN) -> list[Entry]:
        """Return what attempts have noted, of a job or of all, in the order in which they did."""
        path = _journal(self.directory)
        if not path.exists():
            return []
        # A line that is being written has no end yet.
        lines = path.read_text().splitlines(keepends=True)
        entries = [Entry(**json.loads(line)) for line in lines if line.endswith("\n")]
        return [e for e in entries if e.event == event and job_id in (None, e.job_id)]

    def columns(self, job_id: int) -> dict[str, object]:
        """Return all columns of a job."""
        return dict(Job.objects.filter(pk=job_id).values().get())

    def pids(self) -> list[int]:
        """Return the processes of the workers that have not been seen to end, oldest first."""
        return [worker.pid for worker in alive()]

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


def enqueue_many(calls: Iterable[Call]) -> None:
    """Enqueue calls of tasks in one transaction."""
    backend = task_backends["default"]
    assert isinstance(backend, RelayBackend)
    backend.enqueue_many(list(calls))


def counts() -> dict[str, int]:
    """Return how many jobs are in each state that any job is in, from the counters."""
    rows = QueueCount.objects.values_list("state").annotate(Sum("n")).order_by()
    found = {state: n for state, n in rows if n}
    return {state.value: found[state.value] for state in State if state.value in found}
