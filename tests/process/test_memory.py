"""A worker that has done many jobs is as small as one that has done few."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay_queue import store
from relay_queue.models import Job
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, threads

GROWTH_BYTES = 3 * 1024 * 1024
"""What a worker may grow by: SQLite's page cache fills up to 2 MB, and the allocator's
heap keeps the slack of the largest batch. Anything kept per job, be it 100 bytes, would
be 10 MB after 100,000 jobs."""

SLOTS = 8
MOST_THREADS = SLOTS + 2
"""The slots, the loop, and the one that waits for the gate; each is started when first needed."""


@pytest.mark.slow
def test_ten_thousand_jobs_leave_nothing_in_memory(farm: Farm) -> None:
    assert_flat(farm, 10_000)


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_a_hundred_thousand_jobs_leave_nothing_in_memory(farm: Farm) -> None:
    assert_flat(farm, 100_000)


def assert_flat(farm: Farm, jobs: int) -> None:
    """Compare a worker after 1,000 jobs with the same after ``jobs`` more."""
    farm.work(concurrency=SLOTS)
    pid = farm.worker()
    run_many(farm, 1_000)
    bytes_before, files_before = unique_bytes(pid), open_files(pid)
    assert threads(pid) <= MOST_THREADS
    run_many(farm, jobs)
    assert farm.worker() == pid
    assert threads(pid) <= MOST_THREADS
    wait_until(lambda: open_files(pid) <= files_before)  # some are open for a moment only
    grown = unique_bytes(pid) - bytes_before
    assert grown < GROWTH_BYTES, f"{grown / 1024:.0f} KiB more after {jobs} jobs"


def run_many(farm: Farm, count: int) -> None:
    """Enqueue jobs in batches and wait until all are done."""
    job = store.new_job(task=chores.nothing.module_path)
    for _ in range(count // 1_000):
        farm.do(store.enqueue_many, [job] * 1_000)
    farm.wait_finished(timeout=600)
    assert not Job.objects.exclude(state="succeeded").exists()


def unique_bytes(pid: int) -> int:
    """Return the memory that would be free without this process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return sum(kib) * 1024


def open_files(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
