"""What a million jobs leave behind in the files of PostgreSQL: room that the next ones use again."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pytest
from django.db import connection

from relay_queue import store
from relay_queue.models import Job, Lease, QueueCount, QueueMinute, Worker
from relay_queue.states import State
from tests import postgresql
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, on_postgresql

JOBS: Final = int(os.environ.get("RELAY_TORTURE_BLOAT_JOBS", "1000000"))
WAVES: Final = 20
WAVE: Final = JOBS // WAVES
KEPT: Final = 4 * WAVE
"""Finished jobs that are kept; whatever is older is pruned while the next ones run."""

BATCH: Final = 2_000
WAITING: Final = 10_000

JOB, LEASE = Job._meta.db_table, Lease._meta.db_table
COUNTS = QueueCount._meta.db_table
SMALL = (COUNTS, QueueMinute._meta.db_table, Worker._meta.db_table)

VERSIONS: Final = {JOB: 3, LEASE: 2}
"""How often a row is written in its life: a job is inserted, started and finished, a lease is granted
and ended. None of these can be in place, since each moves the row from one index to another."""

SPARSE: Final = 1.5
"""How much more room entries take in the pages of an index that were split than in those of a new one."""

CREEP: Final = 1.25
"""What tables may grow by between the middle and the end. If no room were used again, they would double."""

SMALL_BYTES: Final = 4 * 1024 * 1024
"""More than a table needs that has a few hundred rows, however often they are updated."""

SWEEP_SECONDS: Final = 300.0

pytestmark = [on_postgresql, pytest.mark.torture, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Footprint:
    """How much of the disk a table takes, and what the server has counted of its rows."""

    heap_bytes: int
    index_bytes: int
    live: int
    dead: int
    updates: int
    updates_in_place: int
    deletes: int

    @classmethod
    def of(cls, table: str) -> Footprint:
        """Ask the server."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute(
                "SELECT pg_table_size(relid), pg_indexes_size(relid), n_live_tup, n_dead_tup, "
                "n_tup_upd, n_tup_hot_upd, n_tup_del FROM pg_stat_user_tables WHERE relname = %s",
                [table],
            )
            return cls(*map(int, cursor.fetchone()))

    def __str__(self) -> str:
        in_place = 100 * self.updates_in_place / max(1, self.updates)
        return (
            f"{self.heap_bytes:,} bytes, indexes {self.index_bytes:,} bytes, {self.live:,} rows, "
            f"{self.dead:,} dead, {self.updates:,} updates, {in_place:.0f} % in place"
        )


@pytest.fixture
def postgresql_url() -> Iterator[str]:
    """Return a database of a server of its own, which looks for dead rows more often than others.

    How much is swept in one go and what calls for it are left as they come. A server that looks once
    a minute would have this test wait for most of its time.
    """
    folder = postgresql.make_folder()
    server = postgresql.Server(folder / "server")
    server.folder.mkdir()
    server.start(shared_buffers="256MB", autovacuum_naptime="5s")
    server.migrate()
    yield server.create(f"test_{uuid.uuid4().hex}")
    server.stop("immediate")
    shutil.rmtree(folder)


def test_tables_stay_as_small_as_what_is_kept_however_many_jobs_pass_through(farm: Farm) -> None:
    farm.work(processes=2, concurrency=16)
    for wave in range(1, WAVES + 1):
        work_off(farm)
        wait_until(lambda: is_swept(wave), SWEEP_SECONDS, told, 0.5)  # noqa: B023 - called here
        if wave == WAVES // 2:
            halfway = measured()
    end = measured()
    compact = compacted()
    report(end, compact)
    for table, versions in VERSIONS.items():
        # Swept between the waves, so that all that a wave writes may lie beside what is kept.
        rows = (KEPT + versions * WAVE) / KEPT
        assert end[table].heap_bytes < rows * compact[table].heap_bytes
        # A page of an index stays as it was when all versions of its rows were in it: pages are
        # never joined again, only freed when what is in them is pruned.
        assert end[table].index_bytes < SPARSE * versions * compact[table].index_bytes
        assert end[table].heap_bytes < CREEP * halfway[table].heap_bytes
        assert end[table].index_bytes < CREEP * halfway[table].index_bytes
    for table in SMALL:
        assert end[table].heap_bytes + end[table].index_bytes < SMALL_BYTES
    assert end[COUNTS].updates_in_place >= 0.9 * end[COUNTS].updates


def work_off(farm: Farm) -> None:
    """Put a wave of jobs through the workers, and prune the oldest ones meanwhile."""
    job = store.new_job(task=chores.nothing.module_path)
    for start in range(0, WAVE, BATCH):
        farm.do(store.enqueue_many, [job] * min(BATCH, WAVE - start))
        prune()
        wait_until(lambda: count("ready", "running") <= WAITING, 300, farm.everything, 0.05)
    wait_until(lambda: count("ready", "running") == 0, 300, farm.everything, 0.05)
    prune()


def prune() -> None:
    """Delete the oldest finished jobs, as the retention settings do."""
    while (surplus := count("succeeded") - KEPT) > 0:
        with store.transaction() as tx:
            assert store.prune(tx, State.SUCCEEDED, tx.now, min(surplus, 1_000)).jobs


def count(*states: str) -> int:
    """Count jobs by the counters: to count their rows would walk the whole table."""
    rows = QueueCount.objects.filter(state__in=states)
    return sum(rows.values_list("n", flat=True))


def is_swept(waves: int) -> bool:
    """Whether the server has counted all that was written and has removed what is dead.

    It counts late, and until then it does not know what there is to sweep.
    """
    for table, versions in VERSIONS.items():
        now = Footprint.of(table)
        written = now.updates >= (versions - 1) * waves * WAVE
        deleted = now.deletes >= waves * WAVE - KEPT
        if not (written and deleted and now.dead <= 1_000 + 0.02 * now.live):
            return False
    return True


def measured() -> dict[str, Footprint]:
    """Measure all tables."""
    return {table: Footprint.of(table) for table in (*VERSIONS, *SMALL)}


def told() -> str:
    return "\n".join(f"{table}: {footprint}" for table, footprint in measured().items())


def compacted() -> dict[str, Footprint]:
    """Write the tables anew, and measure them again."""
    with connection.cursor() as cursor:
        for table in VERSIONS:
            cursor.execute(f"VACUUM FULL {table}")
    return measured()


def report(end: Mapping[str, Footprint], compact: Mapping[str, Footprint]) -> None:
    """Print what was measured; ``-s`` shows it."""
    print(f"\n{JOBS:,} jobs, {KEPT:,} kept")
    for table, footprint in end.items():
        print(f"{table}: {footprint}")
        if table in VERSIONS:
            print(f"  compacted: {compact[table]}")
