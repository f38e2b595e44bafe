"""Rows in which the database is at fault: F12, F13, F14."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from django.db import connection

from relay_queue.drill import on_file, tasks, writer
from relay_queue.drill.ground import Ground, is_over
from relay_queue.drill.observation import Observation, at_least, contains, equal, untried
from relay_queue.models import Job
from relay_queue.scratch.workers import Workers
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


def altered_payload(ground: Ground) -> Iterator[Observation]:
    """F12: change one bit in the argument of a job, past Relay."""
    job = ground.enqueue(tasks.pay, ORDER)
    ground.means.alter_argument(ORDER, ALTERED)
    paid = json.loads(ground.job(job).payload)["args"]
    yield equal("argument on disk", paid, [ALTERED])
    ground.work()
    dead = ground.wait_state(job, State.DEAD)
    yield contains("last error", dead.last_error, "ChecksumMismatch")
    yield equal("attempts", ground.outcomes(job), [])
    yield equal("functions that saw it", len(ground.runs(job, tasks.ENDED)), 0)
    yield equal("verify names", _verify(ground), ["checksum", "exit 1"])


def torn_and_flipped(ground: Ground) -> Iterator[Observation]:
    """F13: kill a process that writes, then tear its log, or flip a bit of log or database."""
    connection.close()
    command = [sys.executable, "-m", writer.__name__, *map(str, SIZES)]
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
    torn, flipped = (on_file.copy(ground.directory, name) for name in ("torn", "flipped"))
    on_file.tear_log(torn, TORN_BYTES)
    yield equal("log with a torn tail", _verify(ground, torn), ["log_torn", "exit 1"])
    yield equal("the same, once opened", _verify(ground, torn), ["exit 0"])
    yield equal("jobs in it then", _jobs(ground, torn), SIZES[0])
    log = flipped / on_file.LOG
    on_file.flip_bit(log, on_file.places_of(log, writer.MARK.encode())[0])
    yield equal("log with a flipped bit", _verify(ground, flipped), ["log_corrupt", "exit 1"])
    yield equal("neither", _verify(ground), ["exit 0"])
    yield equal("jobs in it", Job.objects.count(), sum(SIZES))
    on_file.write_out()
    path = ground.directory / on_file.DATABASE
    on_file.flip_bit(path, on_file.places_of(path, INDEX.encode())[0])
    found = ["database_corrupt", "unreadable", "exit 1"]
    yield equal("database with a flipped bit", _verify(ground), found)


INDEX = "relay_lease_one_open"
"""Its name stands in the schema; with a bit flipped there the file does not mean the same."""


def no_room_and_no_lock(ground: Ground) -> Iterator[Observation]:
    """F14: keep a worker's outcome from the database; fill the disk; cut it off; fail a write."""
    workers = ground.work(concurrency=1, fault=ground.means.fault_of_room)
    job = ground.enqueue(tasks.wait, GO)
    ground.wait_run(job)
    with ground.means.writer_taken():
        ground.make(GO)
        ground.wait_run(job, event=tasks.ENDED)
        time.sleep(HELD_SECONDS)
        yield equal("state while locked", ground.job(job).state, "running")
    ground.wait_state(job, State.SUCCEEDED)
    yield equal("attempts then", ground.outcomes(job), ["acked"])

    yield from _held_beyond_all_limits(ground)
    yield from _full(ground, workers)
    if ground.means.has_connections:
        yield from _cut_off(ground)
    yield from _failed_write(ground, workers)


def _held_beyond_all_limits(ground: Ground) -> Iterator[Observation]:
    """Keep an outcome waiting until the lease and the time limit of its attempt are over."""
    limits = {"lease_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
    job = ground.enqueue(tasks.wait, LONG, **limits)
    ground.wait_run(job)
    with ground.means.writer_taken():
        ground.make(LONG)
        ground.wait_run(job, event=tasks.ENDED)
        ground.wait(lambda: is_over(ground.ledger(job)[0]), "the end of the lease")
        time.sleep(HELD_SECONDS)
    ground.wait_state(job, State.SUCCEEDED)
    yield equal("attempts, held past lease and timeout", ground.outcomes(job), ["acked"])


def _full(ground: Ground, workers: Workers) -> Iterator[Observation]:
    job = ground.enqueue(tasks.wait_and_return_much, LATER, MUCH)
    ground.wait_run(job)
    behind = ground.enqueue(tasks.note)
    with ground.means.no_room():
        ground.make(LATER)
        ground.wait(lambda: "No room for the database" in workers.said(), "a full disk")
        states = [ground.job(n).state for n in (job, behind)]
        yield equal("states while full", states, ["running", "ready"])
    ground.wait_state(behind, State.SUCCEEDED)
    yield equal("attempts then", ground.outcomes(job) + ground.outcomes(behind), ["acked", "acked"])


def _cut_off(ground: Ground) -> Iterator[Observation]:
    job = ground.enqueue(tasks.wait, CUT)
    ground.wait_run(job)
    cut = ground.means.cut_connections()
    ground.make(CUT)
    ground.wait_state(job, State.SUCCEEDED)
    yield at_least("connections cut", cut, 1)
    yield equal("attempts, connections cut", ground.outcomes(job), ["acked"])


def _failed_write(ground: Ground, workers: Workers) -> Iterator[Observation]:
    job = ground.enqueue(tasks.wait, LAST)
    owner = ground.wait_run(job)
    broken = ground.means.break_writes(owner.pid)
    ground.make(LAST)
    ground.wait_state(job, State.SUCCEEDED)
    if not broken:
        yield untried("failing write", "this system limits no process from outside")
        return
    yield equal("attempts, write failed", ground.outcomes(job), ["lost", "acked"])
    ended = f"process {owner.pid}, ended with exit code 70"
    yield equal("its process", "replaced" if ended in workers.said() else "kept", "replaced")


def _verify(ground: Ground, directory: Path | None = None) -> list[str]:
    """Run ``relay verify`` as anybody would; return the kinds of faults, and the exit code."""
    done = ground.run("relay", "verify", "--json", directory=directory)
    kinds = sorted({fault["kind"] for fault in json.loads(done.stdout)["faults"]})
    return [*kinds, f"exit {done.returncode}"]


def _jobs(ground: Ground, directory: Path) -> int:
    done = ground.run("relay", "status", "--json", directory=directory)
    (queue,) = json.loads(done.stdout)["queues"]
    return sum(queue["counts"].values())
