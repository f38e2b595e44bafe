"""Workers are killed all the time. Each job still ends once, and the ledger knows of every run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress

import pytest

from relay_queue import store
from relay_queue.models import Job, Lease
from relay_queue.states import TERMINAL
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, is_alive
from tests.store.actions import empty

JOBS = 200
KILL_EVERY_SECONDS = 0.3
KILLING_SECONDS = 8.0
"""Supervisors start dead workers ever more slowly, so killing without end would be a halt."""

FEWEST_KILLS = 4

ROUNDS = int(os.environ.get("RELAY_TORTURE_ROUNDS", "50"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))]
)
def test_every_job_ends_once_while_workers_are_killed(farm: Farm, number: int) -> None:
    play_round(farm, random.Random(f"round {number}"))


@pytest.mark.torture
@pytest.mark.timeout(120 * ROUNDS)
def test_every_job_ends_once_in_many_rounds_of_killing(farm: Farm) -> None:
    for _ in range(ROUNDS):
        seed = random.SystemRandom().getrandbits(32)
        try:
            play_round(farm, random.Random(seed))
        except BaseException as error:
            error.add_note(f"the seed of this round was {seed}")
            raise
        os.unlink(farm.effects)
        empty()


def play_round(farm: Farm, dice: random.Random) -> None:
    """Enqueue jobs, kill until they are done or the time is over, and look at what there is."""
    enqueue_mixture(farm, dice)
    supervisors = [start(farm)]
    wait_until(farm.workers, message=farm.everything)
    began = time.monotonic()
    kills = 0
    while Job.objects.filter(finished_at=None).exists():
        time.sleep(KILL_EVERY_SECONDS)
        if kills < FEWEST_KILLS or time.monotonic() - began < KILLING_SECONDS:
            kills += kill_somebody(farm, supervisors[-1], dice)
        if supervisors[-1].poll() is not None:
            supervisors.append(start(farm))
        assert time.monotonic() - began < 150, farm.everything()
    assert kills >= FEWEST_KILLS, "too few for a test of kills"
    for supervisor in supervisors:
        farm.stop(supervisor)
    assert_ledger_explains_all(farm, JOBS)
    answer = farm.manage("relay", "verify", check=False)
    assert answer.returncode == 0, answer.stdout


def enqueue_mixture(farm: Farm, dice: random.Random) -> None:
    """Enqueue what is quick, what is slow and what fails, in random order."""
    kinds = [
        store.new_job(task=chores.note.module_path, args=[farm.effects]),
        store.new_job(task=chores.note_slowly.module_path, args=[farm.effects, 0.1]),
        store.new_job(task=chores.fail_times.module_path, args=[farm.effects, 1], max_attempts=9),
        store.new_job(task=chores.fail_times.module_path, args=[farm.effects, 9], max_attempts=2),
    ]
    with store.transaction() as tx:
        store.enqueue_many(tx, dice.choices(kinds, weights=[6, 10, 3, 1], k=JOBS))


def start(farm: Farm) -> subprocess.Popen[bytes]:
    return farm.spawn(*farm.command(processes=3, concurrency=2))


def kill_somebody(farm: Farm, supervisor: subprocess.Popen[bytes], dice: random.Random) -> bool:
    """Kill a worker, or one time in ten the supervisor, and say whether there was one."""
    if dice.random() < 0.1:
        supervisor.kill()
        supervisor.wait()
        return True
    alive = [pid for pid in farm.workers() if is_alive(pid)]
    if not alive:
        return False
    with suppress(ProcessLookupError):
        os.kill(dice.choice(alive), signal.SIGKILL)
    return True


def assert_ledger_explains_all(farm: Farm, enqueued: int) -> None:
    """Compare the side-effect file with the ledger, both ways."""
    leases = {lease.pk: lease for lease in Lease.objects.all()}
    runs = Counter((run.job_id, run.epoch, run.attempt) for run in farm.runs())
    assert max(runs.values()) == 1, "one lease, one run"
    for job_id, epoch, attempt in runs:
        assert (leases[epoch].job_id, leases[epoch].attempt) == (job_id, attempt)
    acked = {pk for pk, lease in leases.items() if lease.outcome == "acked"}
    assert acked <= {epoch for _, epoch, _ in runs}, "what was acked has run"
    assert all(lease.outcome for lease in leases.values()), "no lease is open"
    by_job = Counter(leases[pk].job_id for pk in acked)
    jobs = list(Job.objects.all())
    assert len(jobs) == enqueued
    for job in jobs:
        assert job.state in TERMINAL
        assert by_job[job.pk] == (job.state == "succeeded")
