"""What clients and functions saw agrees with the ledger, while processes are killed and stopped."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection

from relay_queue import store
from relay_queue.models import Job, Lease, Worker
from relay_queue.store.records import Settlement
from tests.conftest import wait_until
from tests.history import ledger, witness, witness_postgresql
from tests.history.checker import check, report
from tests.history.evidence import Evidence
from tests.history.journal import Journal, digest, operations
from tests.process.farm import Farm, is_alive, on_each_engine

PRODUCE = """
import sys
from tests.history.chores import produce
produce(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
"""

LEASE_SECONDS = 2.0
STOPPED_SECONDS = 3.0
"""Longer than a lease: a stopped owner comes back late."""

PRODUCERS = 4
LATE = ("lost", "expired", "cancelled", "released", "failed")
"""How leases ended whose owners may come back in vain."""

TORTURE_SEED = os.environ.get("RELAY_TORTURE_SEED")


@pytest.fixture
def journal(farm: Farm, tmp_path: Path) -> Iterator[Journal]:
    """Return the file that everybody writes to; the database takes notes of its own meanwhile."""
    by_engine = {"sqlite": witness.watching, "postgresql": witness_postgresql.watching}
    with by_engine[connection.vendor](str(farm.database)):
        yield Journal(str(tmp_path / "history.jsonl"))


def wake(pid: int) -> None:
    """Let a stopped process go on, if it was not killed meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


class Havoc:
    """What this test does to a farm: deaths, stops, acts of an operator and late owners."""

    def __init__(self, farm: Farm, journal: Journal, dice: random.Random) -> None:
        self.farm = farm
        self.journal = journal
        self.dice = dice
        self.kills = 0
        self.late = 0
        self.alarm: threading.Timer | None = None
        self.supervisor = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start a supervisor with three workers."""
        return self.farm.spawn(*self.farm.command(2, 3, LEASE_SECONDS))

    def strike(self) -> None:
        """Do one thing of many."""
        what = self.dice.random()
        if what < 0.45:
            self.kill()
        elif what < 0.6:
            self.stop()
        elif what < 0.75:
            self.operate()
        else:
            self.come_late()
        if self.kills % 8 == 7 or self.supervisor.poll() is not None:
            self.replace()  # a supervisor starts what dies ever more slowly

    def kill(self) -> None:
        """Kill a worker."""
        alive = [w for w in Worker.objects.filter(stopped_at=None) if is_alive(w.pid)]
        if alive:
            victim = self.dice.choice(alive)
            self.journal.note("worker", "death", worker=victim.pk)
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
            self.kills += 1

    def stop(self) -> None:
        """Keep a worker from running for longer than its leases last."""
        pids = [pid for pid in self.farm.workers() if is_alive(pid)]
        if pids and not (self.alarm and self.alarm.is_alive()):
            pid = self.dice.choice(pids)
            # By a thread: if the worker was stopped as it held the writer, this one waits for it.
            self.alarm = threading.Timer(STOPPED_SECONDS, wake, [pid])
            self.alarm.start()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            self.journal.note("fault", "stopped", stopped=pid)

    def replace(self) -> None:
        """Kill the supervisor, and start another."""
        self.supervisor.kill()
        self.supervisor.wait()
        self.kills += 1
        self.supervisor = self.start()

    def operate(self) -> None:
        """Cancel a job, or requeue one that ended."""
        verb, states = self.dice.choice(
            (("cancel", ("ready", "running")), ("requeue", ("dead", "cancelled")))
        )
        known = list(Job.objects.filter(state__in=states).values_list("id", flat=True)[:50])
        if not known:
            return
        jobs = [self.dice.choice(known)]
        op = f"{verb} {time.monotonic_ns()}"
        self.journal.note("operate", "invoke", op=op, verb=verb, jobs=jobs)
        changed = self.farm.do(getattr(store, verb), jobs)
        self.journal.note("operate", "ok", op=op, jobs=changed.job_ids)

    def come_late(self) -> None:
        """Tell an ack under a lease that has ended, and under the newest one with the old token."""
        ended = list(Lease.objects.filter(outcome__in=LATE).order_by("-id")[:50])
        if ended:
            lease = self.dice.choice(ended)
            self.ack(lease.pk, lease)
            newest = Lease.objects.filter(job_id=lease.job_id).latest("id")
            if newest.pk != lease.pk:
                self.ack(newest.pk, lease)

    def ack(self, lease_id: int, known: Lease) -> None:
        """Tell one ack with a token, and write down the answer."""
        self.late += 1
        op = f"late {time.monotonic_ns()}"
        facts = {"lease": lease_id, "job": known.job_id, "token": digest(known.token)}
        self.journal.note("settle", "told", op=op, verb="ack", **facts)
        with store.transaction() as tx:
            # Of this lease alone: on PostgreSQL others commit meanwhile.
            noted = f"SELECT count(*) FROM {witness.TABLE} WHERE lease = %s"
            ((before,),) = tx.fetch(noted, [lease_id])
            (settled,) = store.settle(tx, [Settlement("ack", lease_id, known.token, "null")])
            ((after,),) = tx.fetch(noted, [lease_id])
        facts = {"accepted": settled.accepted, "reason": settled.reason, "changes": after - before}
        self.journal.note("settle", "answered", op=op, **facts)

    def drain(self, seconds: float) -> None:
        """Without further havoc, wait until every job has ended."""
        if self.alarm:
            self.alarm.join()
        self.replace()
        self.farm.wait_finished(seconds)
        self.farm.stop(self.supervisor)


def play(
    farm: Farm, journal: Journal, dice: random.Random, jobs: int, slow: float, kills: int
) -> Havoc:
    """Let clients enqueue and workers run while havoc is made, until so many were killed."""
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 10
    havoc = Havoc(farm, journal, dice)
    producers = [
        farm.spawn_python(
            PRODUCE, journal.path, f"{dice.random()}", str(jobs // (PRODUCERS - 1)), str(slow)
        )
        for _ in range(PRODUCERS)
    ]
    wait_until(lambda: Job.objects.exists(), message=farm.everything)
    producers[0].kill()  # in the middle of something, whose outcome nobody knows
    while havoc.kills < kills:
        time.sleep(0.15)
        havoc.strike()
    wait_until(lambda: all(p.poll() is not None for p in producers), 600, farm.everything)
    assert [p.returncode for p in producers[1:]] == [0] * (PRODUCERS - 1), farm.everything()
    havoc.drain(60 + jobs / 20)
    return havoc


def judge(farm: Farm, journal: Journal) -> Evidence:
    """Hold everything that was written down against the tables."""
    drivers: dict[str, Any] = {"sqlite": sqlite3, "postgresql": psycopg}
    with closing(drivers[connection.vendor].connect(farm.database)) as past_django:
        seen = Evidence(journal.records(), ledger.read(past_django))
    violations = check(seen)
    assert not violations, report(seen, violations)
    return seen


@on_each_engine
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_ledger_agrees_with_what_clients_and_functions_saw(
    farm: Farm, journal: Journal
) -> None:
    havoc = play(farm, journal, random.Random("history"), jobs=210, slow=0.5, kills=8)
    while havoc.late < 20:
        havoc.come_late()
    seen = judge(farm, journal)
    assert len(seen.added) > 150
    fates = {e.fate for enqueues in seen.enqueues.values() for e in enqueues}
    assert {"ok", "nothing"} <= fates
    outcomes = {lease.outcome for lease in seen.ledger.leases.values()}
    assert {"acked", "failed", "lost"} <= outcomes


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_twenty_thousand_jobs_through_two_hundred_deaths(
    farm: Farm, journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = TORTURE_SEED or str(random.SystemRandom().getrandbits(32))
    havoc = play(farm, journal, random.Random(seed), jobs=24_000, slow=0.02, kills=200)
    while havoc.late < 1000:
        havoc.come_late()
    try:
        seen = judge(farm, journal)
    except AssertionError as error:
        error.add_note(f"the seed was {seed}; RELAY_TORTURE_SEED={seed} deals the same havoc")
        raise
    assert len(seen.added) >= 20_000
    ended = {lease.id: lease.outcome for lease in seen.ledger.leases.values()}
    cut = {start["job"] for start in seen.starts if ended[start["lease"]] in ("lost", "expired")}
    answers = Counter(
        told.answer["accepted"] for told in operations(seen.records, "settle") if told.answer
    )
    with capsys.disabled():
        print(
            f"\n{len(seen.added):,} jobs, {havoc.kills} deaths, "
            f"{len(cut):,} jobs were cut short in a run and ran again or died, "
            f"{answers[False]:,} of {answers.total():,} late acks refused"
        )
    assert not answers[True]
