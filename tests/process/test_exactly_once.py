"""With ``atomic=True`` what a job writes to the queue's database happens once, whoever dies when."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from django.db import connection

from relay_queue.compat import task_backends
from relay_queue.models import Job, Lease
from tests.conftest import wait_until
from tests.process import counting
from tests.process.farm import Farm, on_each_engine

LEASE_SECONDS = 1.0
WORKERS = 2


@pytest.fixture
def counter(farm: Farm) -> Iterator[str]:
    """Return the name of a row that stands at zero."""
    with connection.cursor() as cursor:
        for table in counting.TABLES:
            cursor.execute(table)
        cursor.execute("INSERT INTO counter VALUES ('visits', 0)")
    yield "visits"
    farm.close()
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE counter")
        cursor.execute("DROP TABLE counted")


def value() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT n FROM counter")
        return int(cursor.fetchone()[0])


def counted() -> list[tuple[int, int]]:
    """Return job and epoch of each time that somebody counted."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT job_id, epoch FROM counted ORDER BY job_id")
        return list(cursor.fetchall())


@pytest.mark.slow
def test_a_row_counts_every_job_once_while_workers_are_killed(farm: Farm, counter: str) -> None:
    count_while_killing(farm, counter, random.Random("exactly once"), jobs=160, kills=8)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_row_counts_2000_jobs_once_over_100_kills(farm: Farm, counter: str) -> None:
    seed = random.SystemRandom().getrandbits(32)
    try:
        count_while_killing(farm, counter, random.Random(seed), jobs=2000, kills=100)
    except BaseException as error:
        error.add_note(f"the seed was {seed}")
        raise


def count_while_killing(
    farm: Farm, counter: str, dice: random.Random, *, jobs: int, kills: int
) -> None:
    """Enqueue in slices; in the midst of each, kill a worker, and freeze one now and then."""
    workers = [start(farm) for _ in range(WORKERS)]
    size = jobs // kills
    for number in range(kills):
        enqueue(counter, size)
        wait_for_progress(farm, size * number + dice.randrange(size))
        victim = workers.pop(dice.randrange(WORKERS))
        if number % 8 == 3:
            freeze(victim)
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
        workers.append(start(farm))
    farm.wait_finished(120)
    assert_exactly_once(jobs)
    lost = Lease.objects.filter(outcome="lost").count()
    assert lost, "no kill met a worker that held a job"


def start(farm: Farm) -> subprocess.Popen[bytes]:
    return farm.spawn(*farm.command(concurrency=4, lease=LEASE_SECONDS))


def enqueue(counter: str, jobs: int) -> None:
    backend = task_backends["default"]
    backend.enqueue_many([counting.count.bind(counter, 0.005)] * jobs)  # type: ignore[attr-defined]


def wait_for_progress(farm: Farm, jobs: int) -> None:
    done = Job.objects.filter(state="succeeded")
    wait_until(lambda: done.count() >= jobs, message=farm.everything)


def freeze(victim: subprocess.Popen[bytes]) -> None:
    """Let a worker come back after its leases have ended, and give it time to try something."""
    os.killpg(victim.pid, signal.SIGSTOP)
    time.sleep(1.5 * LEASE_SECONDS)
    os.killpg(victim.pid, signal.SIGCONT)
    time.sleep(0.5)


def assert_exactly_once(jobs: int) -> None:
    epochs = counted()
    assert value() == len(epochs) == jobs
    assert sorted(job_id for job_id, _ in epochs) == sorted(
        Job.objects.values_list("pk", flat=True)
    )
    assert not Job.objects.exclude(state="succeeded").exists()
    acked = Lease.objects.filter(outcome="acked").values_list("job_id", "pk").order_by("job_id")
    assert list(acked) == epochs, "the attempt that counted is the one that was acked"


@on_each_engine
def test_an_owner_that_begins_late_counts_nothing_and_is_refused(farm: Farm, counter: str) -> None:
    counting.count.using(lease_seconds=LEASE_SECONDS).enqueue(counter)
    ready, go = farm.file("ready"), farm.file("go")
    source = "import sys; from tests.process import counting; counting.be_late(*sys.argv[1:])"
    late = farm.spawn_python(source, ready, go)
    wait_until(lambda: os.path.exists(ready), message=lambda: farm.log(late))
    farm.work(lease=60)
    farm.wait_finished()
    farm.make("go")
    assert late.wait(60) == 0, farm.log(late)
    farm.wait_logged(late, "release False NotBegun: the lease ended")
    assert value() == 1
    assert_exactly_once(1)
    first, second = Lease.objects.order_by("pk")
    assert (first.outcome, second.outcome) == ("expired", "acked")
    assert first.refused_at is not None


@on_each_engine
def test_a_function_that_outlives_its_lease_counts_if_and_only_if_it_is_acked(
    farm: Farm, counter: str
) -> None:
    """It holds the writer meanwhile, so nobody could renew its lease, nor take its job."""
    slow = counting.count.using(lease_seconds=LEASE_SECONDS, max_attempts=1)
    job = int(slow.enqueue(counter, 1.5 * LEASE_SECONDS).id)
    farm.work()
    farm.wait_state(job, "succeeded", "dead")
    acked = Lease.objects.filter(outcome="acked")
    assert counted() == list(acked.values_list("job_id", "pk"))
    assert value() == acked.count()
    counting.count.enqueue(counter)
    farm.wait_finished()
    assert value() == acked.count()
