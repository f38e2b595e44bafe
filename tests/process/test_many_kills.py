"""The numbers that are promised: so many jobs through so many kills, and so many late acks refused.

The short versions run with everything else. ``RELAY_TORTURE_JOBS``, ``RELAY_TORTURE_KILLS`` and
``RELAY_TORTURE_LATE_ACKS`` set the size of the long ones.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import pytest
from django.db import connection, transaction

from relay_queue import store
from relay_queue.lab.project import freeze
from relay_queue.models import Job, Lease
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import LOOK_SECONDS, Farm, is_alive
from tests.process.test_kill_rounds import assert_ledger_explains_all

JOBS = int(os.environ.get("RELAY_TORTURE_JOBS", "20000"))
KILLS = int(os.environ.get("RELAY_TORTURE_KILLS", "200"))
LATE_ACKS = int(os.environ.get("RELAY_TORTURE_LATE_ACKS", "1000"))

LEASE_SECONDS = 3.0
KILLS_PER_SUPERVISOR = 10
"""A supervisor starts dead workers ever more slowly; a new one begins anew."""

KILLS_PER_FREEZE = 8
"""Killed workers say nothing more. Frozen ones come back late and have something to say."""

AT_ONCE = 50
"""Late acks of one worker: its slots."""

# SQLite itself watches: no statement of anybody changes a row unseen.
WATCHES = {
    "job_after_end": """
        AFTER UPDATE ON relay_queue_job WHEN OLD.state IN ('succeeded', 'dead', 'cancelled')
        BEGIN INSERT INTO watched VALUES ('job changed after its end', OLD.id); END""",
    "lease_after_end": """
        AFTER UPDATE ON relay_queue_lease WHEN OLD.ended_at IS NOT NULL
            AND (NEW.outcome IS NOT OLD.outcome OR NEW.ended_at IS NOT OLD.ended_at)
        BEGIN INSERT INTO watched VALUES ('lease ended twice', OLD.id); END""",
    "stale_ack": """
        AFTER UPDATE ON relay_queue_lease WHEN NEW.outcome = 'acked'
            AND (OLD.ended_at IS NOT NULL OR OLD.expires_at < NEW.ended_at)
        BEGIN INSERT INTO watched VALUES ('stale ack accepted', OLD.id); END""",
}


class Figures(NamedTuple):
    """What came of a run."""

    jobs: int
    kills: int
    seconds: float
    lost: int
    duplicates: int
    late_returns: int
    watched: list[tuple[str, int]]

    def __str__(self) -> str:
        return (
            f"{self.jobs:,} jobs through {self.kills} kills in {self.seconds:.0f} s: "
            f"{self.lost} lost, {self.duplicates:,} run again, "
            f"{self.late_returns} late returns refused, {len(self.watched)} forbidden changes"
        )


def watched() -> list[tuple[str, int]]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT what, id FROM watched")
        return cursor.fetchall()


@contextmanager
def watching() -> Iterator[None]:
    """Note in a table what must never happen to jobs and leases."""
    names = [f"watch_{name}" for name in WATCHES]
    execute("CREATE TABLE watched (what TEXT, id INTEGER)")
    try:
        for name, body in zip(names, WATCHES.values(), strict=True):
            execute(f"CREATE TRIGGER {name} {body}")
        yield
    finally:
        for name in names:
            execute(f"DROP TRIGGER IF EXISTS {name}")
        execute("DROP TABLE watched")


def execute(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def test_each_forbidden_change_is_seen(farm: Farm) -> None:
    farm.work(lease=LEASE_SECONDS)
    job = farm.enqueue(chores.note)
    farm.wait_state(job, "succeeded")
    with watching(), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("UPDATE relay_queue_job SET priority = 1")
        cursor.execute("UPDATE relay_queue_lease SET outcome = 'failed'")
        cursor.execute("UPDATE relay_queue_lease SET outcome = 'acked'")
        seen = {what for what, _ in watched()}
        transaction.set_rollback(True)
    assert seen == {"job changed after its end", "lease ended twice", "stale ack accepted"}


# --- Kills ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_no_job_is_lost_through_kills(farm: Farm) -> None:
    check(torment(farm, jobs=600, kills=8, dice=random.Random("short")))


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_no_job_of_many_is_lost_through_many_kills(
    farm: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    try:
        figures = torment(farm, JOBS, KILLS, random.Random(seed))
        check(figures)
    except BaseException as error:
        error.add_note(f"the seed was {seed}")
        raise
    with capsys.disabled():
        print(f"\n{figures}")


def check(figures: Figures) -> None:
    assert (figures.lost, figures.watched) == (0, []), str(figures)
    assert figures.duplicates > 0, f"nobody was killed at work: {figures}"


def torment(farm: Farm, jobs: int, kills: int, dice: random.Random) -> Figures:
    """Enqueue a share of the jobs, kill a worker that is at work, and so on to the end."""
    began = time.monotonic()
    done = 0
    with watching():
        herd = Herd(farm, dice)
        for number in range(kills):
            upto = jobs * (number + 1) // kills
            enqueue(farm, upto - done, dice)
            done = upto
            herd.kill()
        herd.thaw_all()
        wait_finished(farm, 120, herd.keep_up)
        herd.stop()
        bad = watched()
    assert_ledger_explains_all(farm, jobs)
    assert farm.manage("relay", "verify", check=False).returncode == 0
    return Figures(
        jobs=jobs,
        kills=herd.kills,
        seconds=time.monotonic() - began,
        lost=jobs - Job.objects.filter(state="succeeded").count(),
        duplicates=len(farm.runs()) - len({run.job_id for run in farm.runs()}),
        late_returns=Lease.objects.filter(refused_at__isnull=False).count(),
        watched=bad,
    )


def enqueue(farm: Farm, number: int, dice: random.Random) -> None:
    """Enqueue jobs that take a moment, so that a kill finds some at work."""
    kinds = [
        store.new_job(
            task=chores.note_slowly.module_path,
            args=[farm.effects, seconds],
            max_attempts=50,
            lease_seconds=LEASE_SECONDS,
        )
        for seconds in (0.0, 0.01, 0.05, 0.2)
    ]
    farm.do(store.enqueue_many, dice.choices(kinds, weights=[4, 4, 2, 1], k=number))


class Herd:
    """The workers that are killed; a supervisor with three of them at a time."""

    def __init__(self, farm: Farm, dice: random.Random) -> None:
        self.farm = farm
        self.dice = dice
        self.kills = 0
        self.frozen: dict[int, float] = {}
        self.supervisors = [self._start()]

    def _start(self) -> subprocess.Popen[bytes]:
        return self.farm.work(processes=3, concurrency=4)

    def kill(self) -> None:
        """Kill one worker that holds leases; now and then the supervisor too, or freeze one."""
        pid = 0
        while not (pid and is_alive(pid)):  # it may have left meanwhile
            pid = wait_until(self._somebody, 60, self.farm.everything, LOOK_SECONDS)
            time.sleep(self.dice.uniform(0, 0.1))  # into whatever it does by then
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        if self.kills % KILLS_PER_FREEZE == KILLS_PER_FREEZE // 2:
            self._freeze()
        if self.kills % KILLS_PER_SUPERVISOR == 0:
            self._replace_supervisor()
        self._thaw(time.monotonic())

    def _somebody(self) -> int | None:
        """Return a worker at work, if there is one."""
        self._thaw(time.monotonic())
        self.keep_up()
        holders = Lease.objects.filter(ended_at=None, worker__stopped_at=None)
        pids = sorted(set(holders.values_list("worker__pid", flat=True)) - set(self.frozen))
        alive = [pid for pid in pids if is_alive(pid)]
        return self.dice.choice(alive) if alive else None

    def _freeze(self) -> None:
        pid = wait_until(self._somebody, 60, self.farm.everything, LOOK_SECONDS)
        freeze(pid)
        self.frozen[pid] = time.monotonic() + 1.5 * LEASE_SECONDS

    def _thaw(self, now: float) -> None:
        for pid in [pid for pid, until in self.frozen.items() if until < now]:
            del self.frozen[pid]
            # The system itself wakes what is frozen when its supervisor is killed.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def thaw_all(self) -> None:
        """Let those that are frozen go on, once their time is over."""
        while self.frozen:
            time.sleep(LOOK_SECONDS)
            self._thaw(time.monotonic())

    def _replace_supervisor(self) -> None:
        """Kill it: its workers leave when they have seen that, and others are there already."""
        old = self.supervisors[-1]
        self.supervisors.append(self._start())
        old.kill()
        old.wait()

    def keep_up(self) -> None:
        """Start a supervisor in place of one that has given up."""
        if self.supervisors[-1].poll() is not None:
            self.supervisors.append(self._start())

    def stop(self) -> None:
        """Stop what is left."""
        for supervisor in self.supervisors:
            self.farm.stop(supervisor)


def wait_finished(farm: Farm, seconds: float, meanwhile: Callable[[], None]) -> None:
    unfinished = Job.objects.filter(finished_at=None)

    def finished() -> bool:
        meanwhile()
        return not unfinished.exists()

    wait_until(finished, seconds, farm.everything, LOOK_SECONDS)


# --- Late acks ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_late_acks_are_all_refused_and_recorded(farm: Farm) -> None:
    assert refuse(farm, AT_ONCE) == AT_ONCE


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_late_acks_of_many_are_all_refused_and_recorded(
    farm: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = refuse(farm, LATE_ACKS)
    with capsys.disabled():
        print(f"\n{refused:,} of {LATE_ACKS:,} late acks refused and recorded")
    assert refused == LATE_ACKS


def refuse(farm: Farm, acks: int) -> int:
    """Let one of two workers come back late, again and again; return how many acks were refused."""
    farm.work(processes=2, concurrency=AT_ONCE)
    late, other = farm.workers()
    with watching():
        for start in range(0, acks, AT_ONCE):
            come_back_late(farm, min(AT_ONCE, acks - start), f"go-{start}", late, other)
        assert watched() == []
    refused = Lease.objects.filter(refused_verb="ack", refused_at__isnull=False, attempt=1)
    assert set(refused.values_list("worker__pid", "outcome")) == {(late, "expired")}
    assert Job.objects.filter(state="succeeded", attempt=2).count() == acks
    return refused.count()


def come_back_late(farm: Farm, number: int, until: str, late: int, other: int) -> None:
    with frozen(other):
        call = chores.wait_first_time.using(lease_seconds=LEASE_SECONDS)
        jobs = [int(call.enqueue(farm.effects, farm.file(until)).id) for _ in range(number)]
        wait_until(
            lambda: len({run.job_id for run in farm.runs(word="began")} & set(jobs)) == number,
            60,
            farm.everything,
            LOOK_SECONDS,
        )
        freeze(late)
    # The other one takes over what has expired.
    mine = Job.objects.filter(pk__in=jobs)
    wait_until(
        lambda: mine.filter(state="succeeded").count() == number, 60, farm.everything, LOOK_SECONDS
    )
    before = list(mine.order_by("pk").values())
    farm.make(until)
    os.kill(late, signal.SIGCONT)
    refused = Lease.objects.filter(job__in=jobs, attempt=1, refused_at__isnull=False)
    wait_until(lambda: refused.count() == number, message=farm.everything, interval=LOOK_SECONDS)
    assert list(mine.order_by("pk").values()) == before, "a refused ack changes nothing"


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
