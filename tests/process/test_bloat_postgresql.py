"""What many jobs leave behind in the files of PostgreSQL: a little more than their own size."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from django.db import connection

from relay_queue import store
from relay_queue.models import Job
from relay_queue.states import State
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, on_postgresql

JOBS = int(os.environ.get("RELAY_TORTURE_BLOAT_JOBS", "1000000"))
BATCH = 10_000
WAITING = 50_000
"""Jobs that wait at the most: a queue that is worked off while it is filled."""

LEDGER = ("relay_queue_job", "relay_queue_lease")
COUNTERS = ("relay_queue_queuecount", "relay_queue_queueminute", "relay_queue_worker")

pytestmark = [on_postgresql, pytest.mark.torture, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Footprint:
    """How much a table takes, indexes included, and how it is updated."""

    size_bytes: int
    live: int
    dead: int
    updates: int
    updates_in_place: int

    @classmethod
    def of(cls, table: str) -> Footprint:
        """Read what the server has counted."""
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_total_relation_size(relid), n_live_tup, n_dead_tup, n_tup_upd, "
                "n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = %s",
                [table],
            )
            return cls(*map(int, cursor.fetchone()))


def test_a_million_jobs_leave_no_bloat_and_pruned_ones_leave_room(farm: Farm) -> None:
    farm.work(processes=2, concurrency=16)
    work_off(farm, JOBS // 2)
    first = swept()
    pruned = sum(iter(prune_some, 0))
    assert pruned == JOBS // 2
    swept()
    work_off(farm, JOBS // 2)
    second = swept()
    for table in LEDGER:
        # The room of those that were pruned is used again.
        assert second[table].size_bytes < 1.25 * first[table].size_bytes, (first, second)
        assert second[table].dead <= 0.05 * second[table].live + 1_000, second
        compact = compacted(table)
        print(f"{table}: {second[table]}; compacted {compact:,} bytes")
        assert second[table].size_bytes < 3 * compact
    for table in COUNTERS:
        print(f"{table}: {second[table]}")
        assert second[table].size_bytes < 4 * 1024 * 1024
        assert second[table].updates_in_place >= 0.9 * second[table].updates


def work_off(farm: Farm, jobs: int) -> None:
    """Enqueue jobs while workers run them, and wait until all are done."""
    nothing = store.prepare(task=chores.nothing.module_path)
    done = Job.objects.filter(state="succeeded").count()
    for start in range(0, jobs, BATCH):
        farm.do(store.enqueue_many, [nothing] * min(BATCH, jobs - start))
        wait_until(lambda: unfinished() <= WAITING, timeout=600, interval=0.2)
    # The counters tell as well as the jobs do, and reading those would walk the whole table.
    wait_until(lambda: unfinished() == 0, timeout=600, message=farm.everything, interval=0.2)
    assert Job.objects.filter(state="succeeded").count() == done + jobs


def unfinished() -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT COALESCE(SUM(n), 0) FROM relay_queue_queuecount "
            "WHERE state IN ('ready', 'running')"
        )
        return int(cursor.fetchone()[0])


def prune_some() -> int:
    with store.transaction() as tx:
        return store.prune(tx, State.SUCCEEDED, tx.now)


def swept() -> dict[str, Footprint]:
    """Wait until the server's own vacuum has nothing more to do, and measure all tables."""

    def clean() -> bool:
        return all(Footprint.of(t).dead <= 0.03 * Footprint.of(t).live + 1_000 for t in LEDGER)

    wait_until(clean, timeout=300, interval=1.0, message=lambda: str([*map(Footprint.of, LEDGER)]))
    return {table: Footprint.of(table) for table in (*LEDGER, *COUNTERS)}


def compacted(table: str) -> int:
    """Write a table anew, and return its size then."""
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM FULL {table}")
    return Footprint.of(table).size_bytes
