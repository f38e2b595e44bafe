"""A log that nobody reads: a full pipe behind the output of supervisor and workers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from relay_queue import store
from tests.conftest import STOP_SECONDS, wait_until
from tests.process import chores
from tests.process.farm import Farm, on_each_engine

LEASE_SECONDS = 2.0

Start = Callable[..., subprocess.Popen[bytes]]


class Pipe:
    """The output of a process, read by nobody until `drain`."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def fill(self) -> None:
        """Leave no room for another byte, whatever else is written."""
        # The mode is one of the open file, which the workers share: theirs must stay as it is.
        writer = os.open(f"/proc/self/fd/{self.writer}", os.O_WRONLY | os.O_NONBLOCK)
        for size in (4096, 1):
            with suppress(BlockingIOError):
                while os.write(writer, b"." * size):
                    pass
        os.close(writer)

    def drain(self) -> str:
        """Return what is in the pipe."""
        found = b""
        with suppress(BlockingIOError):
            while more := os.read(self.reader, 65536):
                found += more
        return found.decode(errors="replace")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def start(farm: Farm, pipe: Pipe, *, processes: int = 1) -> subprocess.Popen[bytes]:
    """Start workers with short leases whose output goes to the pipe."""
    farm.relay |= {"MIN_LEASE_SECONDS": 1, "POLL_SECONDS": 1}
    command = farm.command(4, processes, lease=LEASE_SECONDS)
    return farm._registered(
        processes,
        lambda: farm.spawn(*command, stdout=pipe.writer, stderr=subprocess.STDOUT),
    )


@on_each_engine
def test_leases_are_renewed_and_workers_replaced_while_nobody_reads_the_log(
    farm: Farm, pipe: Pipe
) -> None:
    supervisor = start(farm, pipe, processes=2)
    pipe.fill()
    waiting = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(waiting)
    # A line for the loop to write: what a late return is told.
    lost = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(lost)
    farm.do(store.cancel, [lost])
    held = {run.pid for run in farm.runs()}
    victims = set(farm.workers()) - held
    for pid in victims:
        os.kill(pid, signal.SIGKILL)  # a line for the supervisor
    more = [farm.enqueue(chores.note) for _ in range(8)]
    for job in more:
        farm.wait_state(job, "succeeded")
    first = farm.leases(waiting)[0].expires_at
    wait_until(lambda: farm.leases(waiting)[0].expires_at > first, message=farm.everything)
    farm.make("go")
    farm.wait_state(waiting, "succeeded")
    assert farm.outcomes(waiting) == ["acked"]
    farm.wait_refused(farm.leases(lost)[0].id)
    supervisor.terminate()
    assert supervisor.wait(STOP_SECONDS) == 0, "it could not leave"


def test_functions_that_wait_for_the_log_keep_their_leases_and_nobody_from_stopping(
    farm: Farm, pipe: Pipe
) -> None:
    supervisor = start(farm, pipe)
    pipe.fill()
    job = farm.enqueue(chores.complain, 1)
    farm.wait_runs(job)
    lease = farm.leases(job)[0]
    wait_until(lambda: farm.leases(job)[0].expires_at > lease.expires_at, message=farm.everything)
    other = farm.enqueue(chores.note)
    farm.wait_state(other, "succeeded")
    supervisor.terminate()
    assert supervisor.wait(STOP_SECONDS) == 0, "it could not leave"
    assert farm.outcomes(job) == ["released"]


def test_lines_are_written_once_somebody_reads_again(farm: Farm, pipe: Pipe) -> None:
    supervisor = start(farm, pipe, processes=2)
    pipe.fill()
    victim = farm.workers()[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: victim not in farm.workers() and len(farm.workers()) == 2)
    supervisor.terminate()
    found = [pipe.drain()]

    def said(words: str) -> bool:
        found.append(pipe.drain())
        return words in "".join(found)

    wait_until(lambda: said("Stopping: workers have"), message=lambda: found[-1])
    assert "by SIGKILL; starting another" in "".join(found)
    assert supervisor.wait(STOP_SECONDS) == 0
