"""Rows in which the database is at fault: F12, F13, F14."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from django.db import connection

from relay_queue.drill import tampering, tasks, writer
from relay_queue.drill.ground import Ground
from relay_queue.drill.observation import Observation, contains, equal, untried
from relay_queue.models import Job
from relay_queue.scratch.workers import Workers
from relay_queue.states import State

ORDER = "order 10000 of the drill"
SIZES = (20, 7)
TORN_BYTES = 100
MUCH = 200_000
LITTLE = 2_000
GO, LATER, LAST = "go", "later", "last"

HELD_SECONDS = 1.0
"""How long the writer is kept from a worker that has an outcome: several of its tries."""


def altered_payload(ground: Ground) -> Iterator[Observation]:
    """F12: flip a bit in the argument of a job, in the database file."""
    job = ground.enqueue(tasks.pay, ORDER)
    tampering.write_out()
    path = ground.directory / tampering.DATABASE
    for place in tampering.places_of(path, ORDER.encode()):
        tampering.flip_bit(path, place + ORDER.index("1"), 8)
    paid = json.loads(ground.job(job).payload)["args"]
    yield equal("argument on disk", paid, [ORDER.replace("1", "9")])
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
    torn, flipped = (tampering.copy(ground.directory, name) for name in ("torn", "flipped"))
    tampering.tear_log(torn, TORN_BYTES)
    yield equal("log with a torn tail", _verify(ground, torn), ["log_torn", "exit 1"])
    yield equal("the same, once opened", _verify(ground, torn), ["exit 0"])
    yield equal("jobs in it then", _jobs(ground, torn), SIZES[0])
    log = flipped / tampering.LOG
    tampering.flip_bit(log, tampering.places_of(log, writer.MARK.encode())[0])
    yield equal("log with a flipped bit", _verify(ground, flipped), ["log_corrupt", "exit 1"])
    yield equal("neither", _verify(ground), ["exit 0"])
    yield equal("jobs in it", Job.objects.count(), sum(SIZES))
    tampering.write_out()
    path = ground.directory / tampering.DATABASE
    tampering.flip_bit(path, tampering.places_of(path, INDEX.encode())[0])
    found = ["database_corrupt", "unreadable", "exit 1"]
    yield equal("database with a flipped bit", _verify(ground), found)


INDEX = "relay_lease_one_open"
"""Its name stands in the schema; with a bit flipped there the file does not mean the same."""


def no_room_and_no_lock(ground: Ground) -> Iterator[Observation]:
    """F14: let another program hold the writer, let the disk be full, let a write fail."""
    workers = ground.work(concurrency=1, fault="room")
    job = ground.enqueue(tasks.wait, GO)
    ground.wait_run(job)
    with tampering.writer_taken(ground.directory):
        ground.make(GO)
        ground.wait_run(job, event=tasks.ENDED)
        time.sleep(HELD_SECONDS)
        yield equal("state while locked", ground.job(job).state, "running")
    ground.wait_state(job, State.SUCCEEDED)
    yield equal("attempts then", ground.outcomes(job), ["acked"])

    job = ground.enqueue(tasks.wait_and_return_much, LATER, MUCH)
    ground.wait_run(job)
    behind = ground.enqueue(tasks.note)
    ground.make("fill_disk")
    ground.make(LATER)
    ground.wait(lambda: "No room for the database" in workers.said(), "a full disk")
    yield equal(
        "states while full", [ground.job(n).state for n in (job, behind)], ["running", "ready"]
    )
    ground.remove("fill_disk")
    ground.wait_state(behind, State.SUCCEEDED)
    yield equal("attempts then", ground.outcomes(job) + ground.outcomes(behind), ["acked", "acked"])
    yield from _failed_write(ground, workers)


def _failed_write(ground: Ground, workers: Workers) -> Iterator[Observation]:
    if not tampering.CAN_BREAK_WRITES:
        yield untried("failing write", "this system limits no process from outside")
        return
    job = ground.enqueue(tasks.wait, LAST)
    owner = ground.wait_run(job)
    tampering.break_writes(owner.pid, LITTLE)
    ground.make(LAST)
    ground.wait_state(job, State.SUCCEEDED)
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
