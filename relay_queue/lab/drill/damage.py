"""Rows in which the database is at fault: F12, F13, F14."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from django.db import connection

from relay_queue.lab import tasks
from relay_queue.lab.drill import injector
from relay_queue.lab.drill.injector import FaultInjector, injector_for
from relay_queue.lab.drill.results import Observation, at_least, contains, equal, untried
from relay_queue.lab.processes import started
from relay_queue.lab.project import ENDED, ScratchProject, Workers
from relay_queue.models import Job
from relay_queue.states import State

ORDER = "order 10000 of the drill"
ALTERED = "order 90000 of the drill"
SIZES = (20, 7)
TORN_BYTES = 100
MUCH = 200_000
GO, LONG, LATER, CUT, LAST = "go", "long", "later", "cut", "last"

HELD_SECONDS = 1.0
"""How long the writer is kept from a worker that has an outcome: several of its tries."""

LIMIT_SECONDS = 4.0
"""Of an attempt whose outcome waits for longer; its function needs much less."""


def altered_payload(project: ScratchProject) -> Iterator[Observation]:
    """F12: change one bit in the argument of a job, past Relay."""
    job = project.enqueue(tasks.pay, ORDER)
    injector_for(project).alter_argument(ORDER, ALTERED)
    paid = json.loads(project.job(job).payload)["args"]
    yield equal("argument on disk", paid, [ALTERED])
    project.work()
    dead = project.wait_state(job, State.DEAD)
    yield contains("last error", dead.last_error, "ChecksumMismatch")
    yield equal("attempts", project.outcomes(job), [])
    yield equal("functions that saw it", len(project.runs(job, ENDED)), 0)
    yield equal("verify names", _verify(project), ["checksum", "exit 1"])


def torn_and_flipped(project: ScratchProject) -> Iterator[Observation]:
    """F13: kill a process that writes, then tear its log, or flip a bit of log or database."""
    connection.close()
    with started(["kill-writer", *map(str, SIZES)], project.directory, {}) as killed:
        killed.wait()
    torn, flipped = (injector.copy(project.directory, name) for name in ("torn", "flipped"))
    injector.tear_log(torn, TORN_BYTES)
    yield equal("log with a torn tail", _verify(project, torn), ["log_torn", "exit 1"])
    yield equal("the same, once opened", _verify(project, torn), ["exit 0"])
    yield equal("jobs in it then", _jobs(project, torn), SIZES[0])
    log = flipped / injector.LOG
    injector.flip_bit(log, injector.places_of(log, tasks.KILLED_WRITER.encode())[0])
    yield equal("log with a flipped bit", _verify(project, flipped), ["log_corrupt", "exit 1"])
    yield equal("neither", _verify(project), ["exit 0"])
    yield equal("jobs in it", Job.objects.count(), sum(SIZES))
    injector.write_out()
    injector.flip_bit(project.file, injector.places_of(project.file, INDEX.encode())[0])
    found = ["database_corrupt", "unreadable", "exit 1"]
    yield equal("database with a flipped bit", _verify(project), found)


INDEX = "relay_lease_one_open"
"""Its name stands in the schema; with a bit flipped there the file does not mean the same."""


def no_room_and_no_lock(project: ScratchProject) -> Iterator[Observation]:
    """F14: keep a worker's outcome from the database; fill the disk; cut it off; fail a write."""
    harm = injector_for(project)
    workers = project.work(concurrency=1, fault=harm.fault_of_room)
    job = project.enqueue(tasks.wait, GO)
    project.wait_run(job)
    with harm.writer_taken():
        project.make(GO)
        project.wait_run(job, event=ENDED)
        time.sleep(HELD_SECONDS)
        yield equal("state while locked", project.job(job).state, "running")
    project.wait_state(job, State.SUCCEEDED)
    yield equal("attempts then", project.outcomes(job), ["acked"])

    yield from _held_beyond_all_limits(project, harm)
    yield from _full(project, workers, harm)
    if harm.has_connections:
        yield from _cut_off(project, harm)
    yield from _failed_write(project, workers, harm)


def _held_beyond_all_limits(project: ScratchProject, harm: FaultInjector) -> Iterator[Observation]:
    """Keep an outcome waiting until the lease and the time limit of its attempt are over."""
    limits = {"lease_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
    job = project.enqueue(tasks.wait, LONG, **limits)
    project.wait_run(job)
    with harm.writer_taken():
        project.make(LONG)
        project.wait_run(job, event=ENDED)
        project.wait_expiry(job)
        time.sleep(HELD_SECONDS)
    project.wait_state(job, State.SUCCEEDED)
    yield equal("attempts, held past lease and timeout", project.outcomes(job), ["acked"])


def _full(project: ScratchProject, workers: Workers, harm: FaultInjector) -> Iterator[Observation]:
    job = project.enqueue(tasks.wait_and_return_much, LATER, MUCH)
    project.wait_run(job)
    behind = project.enqueue(tasks.finish)
    with harm.no_room():
        project.make(LATER)
        project.wait("a full disk", lambda: "No room for the database" in workers.said())
        states = [project.job(n).state for n in (job, behind)]
        yield equal("states while full", states, ["running", "ready"])
    project.wait_state(behind, State.SUCCEEDED)
    yield equal(
        "attempts then", project.outcomes(job) + project.outcomes(behind), ["acked", "acked"]
    )


def _cut_off(project: ScratchProject, harm: FaultInjector) -> Iterator[Observation]:
    job = project.enqueue(tasks.wait, CUT)
    project.wait_run(job)
    cut = harm.cut_connections()
    project.make(CUT)
    project.wait_state(job, State.SUCCEEDED)
    yield at_least("connections cut", cut, 1)
    yield equal("attempts, connections cut", project.outcomes(job), ["acked"])


def _failed_write(
    project: ScratchProject, workers: Workers, harm: FaultInjector
) -> Iterator[Observation]:
    job = project.enqueue(tasks.wait, LAST)
    owner = project.wait_run(job)
    broken = harm.break_writes(owner.pid)
    project.make(LAST)
    project.wait_state(job, State.SUCCEEDED)
    if not broken:
        yield untried("failing write", "this system limits no process from outside")
        return
    yield equal("attempts, write failed", project.outcomes(job), ["lost", "acked"])
    ended = f"process {owner.pid}, ended with exit code 70"
    yield equal("its process", "replaced" if ended in workers.said() else "kept", "replaced")


def _verify(project: ScratchProject, directory: Path | None = None) -> list[str]:
    """Run ``relay verify`` as anybody would; return the kinds of faults, and the exit code."""
    done = project.run("relay", "verify", "--json", directory=directory)
    kinds = sorted({fault["kind"] for fault in json.loads(done.stdout)["faults"]})
    return [*kinds, f"exit {done.returncode}"]


def _jobs(project: ScratchProject, directory: Path) -> int:
    done = project.run("relay", "status", "--json", directory=directory)
    (queue,) = json.loads(done.stdout)["queues"]
    return sum(queue["counts"].values())
