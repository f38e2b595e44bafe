"""Hard environments: disks that fail, databases that others hold, clocks that jump, upgrades."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from relay_queue import store
from relay_queue.models import Job, Lease
from tests.conftest import wait_until
from tests.power import INIT_VARIABLE
from tests.power.shim import faults
from tests.process import chores, stopping
from tests.process import test_kill_rounds as kill_rounds
from tests.process.farm import Farm, is_alive, stopped, writer_taken
from tests.store.actions import empty

MOST_BURSTS = 15
SYNC_FAILS = ("sync", errno.EIO)

# --- The disk ---------------------------------------------------------------------------------


def test_outcomes_wait_for_room_on_a_full_disk(farm: Farm, shim: Path) -> None:
    """As on a small file system, but where nobody may mount one."""
    farm.variables = faults(shim, farm.database, farm.file("fault"))
    workers = farm.work(concurrency=1)
    pid = farm.worker()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    Path(farm.file("fault")).write_text(f"write {errno.ENOSPC}")
    farm.make("go")
    waiting = farm.enqueue(chores.note)
    wait_until(
        lambda: "No room for the database" in farm.log(workers), message=lambda: farm.log(workers)
    )
    assert (farm.job(job).state, farm.job(waiting).state) == ("running", "ready")
    os.unlink(farm.file("fault"))
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert farm.wait_state(waiting, "succeeded").attempt == 1
    assert farm.workers() == [pid]
    assert len(farm.runs(job)) == 2


def test_workers_that_start_on_a_full_disk_wait_for_room(farm: Farm, shim: Path) -> None:
    """Failed starts would use up the supervisor's patience within seconds."""
    farm.variables = faults(shim, farm.database, farm.file("fault"))
    job = farm.enqueue(chores.note)
    Path(farm.file("fault")).write_text(f"write {errno.ENOSPC}")
    workers = farm.spawn(*farm.command(processes=2))
    wait_until(lambda: len(farm.pids()) == 3, message=lambda: farm.log(workers))
    time.sleep(5)  # longer than all the starts that a supervisor tries
    assert workers.poll() is None, farm.log(workers)
    os.unlink(farm.file("fault"))
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert "before it was ready" not in farm.log(workers)


@pytest.mark.parametrize("what", ["write", "sync"])
def test_after_an_io_error_the_process_is_replaced_and_leases_decide(
    farm: Farm, shim: Path, what: str
) -> None:
    farm.variables = faults(shim, farm.database, farm.file("fault"))
    workers = farm.work(concurrency=2)
    first = farm.worker()
    running = farm.enqueue(chores.wait_first_time, farm.file("never"))
    finished = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(running)
    farm.wait_runs(finished)
    Path(farm.file("fault")).write_text(f"{what} {errno.EIO}")
    farm.make("go")
    wait_until(lambda: not is_alive(first), message=lambda: farm.log(workers))
    os.unlink(farm.file("fault"))
    farm.wait_logged(workers, "Nobody knows what was committed")
    assert farm.wait_state(running, "succeeded").attempt == 2
    assert farm.outcomes(running) == ["lost", "acked"]
    # Its ack was not committed, or was: the ledger and the runs agree on it either way.
    farm.wait_state(finished, "succeeded")
    *before, last = farm.outcomes(finished)
    assert (set(before) <= {"lost"}, last) == (True, "acked")
    assert len(farm.runs(finished, "began")) == len(before) + 1
    assert farm.manage("relay", "verify").returncode == 0


@pytest.mark.parametrize("number", [1])
def test_every_job_ends_once_on_a_disk_that_fails_now_and_then(
    farm: Farm, shim: Path, number: int
) -> None:
    play_bad_disk(farm, shim, random.Random(f"disk {number}"))


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_every_job_ends_once_in_many_rounds_on_a_bad_disk(farm: Farm, shim: Path) -> None:
    for _ in range(20):
        seed = random.SystemRandom().getrandbits(32)
        try:
            play_bad_disk(farm, shim, random.Random(seed))
        except BaseException as error:
            error.add_note(f"the seed of this round was {seed}")
            raise
        os.unlink(farm.effects)
        empty()


def play_bad_disk(farm: Farm, shim: Path, dice: random.Random) -> None:
    """Let writes and syncs fail in bursts until all jobs are done, and look at what there is."""
    order = Path(farm.file("fault"))
    farm.variables = faults(shim, farm.database, str(order))
    kill_rounds.enqueue_mixture(farm, dice)
    workers = kill_rounds.start(farm)
    wait_until(lambda: farm.runs(), message=lambda: farm.log(workers))
    deadline, bursts = time.monotonic() + 120, 0
    while Job.objects.filter(finished_at=None).exists():
        if bursts < MOST_BURSTS:
            what, number = dice.choice([("write", errno.ENOSPC), ("write", errno.EIO), SYNC_FAILS])
            order.write_text(f"{what} {number}")
            time.sleep(dice.uniform(0.01, 0.2))
            order.unlink()
            bursts += 1
        time.sleep(dice.uniform(0.1, 0.4))
        if workers.poll() is not None:
            workers = kill_rounds.start(farm)
        assert time.monotonic() < deadline, farm.everything()
    assert bursts > 2, "too few for a test of faults"
    farm.stop(workers)
    kill_rounds.assert_ledger_explains_all(farm, kill_rounds.JOBS)
    assert farm.manage("relay", "verify", check=False).returncode == 0


# --- Others who use the database --------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds", [1, 5, pytest.param(30, marks=[pytest.mark.torture, pytest.mark.timeout(300)])]
)
def test_another_program_that_holds_the_writer_causes_no_duplicate(
    farm: Farm, seconds: int
) -> None:
    """With the default lease, at whatever age of the leases it begins."""
    farm.work(processes=2, concurrency=4)
    jobs = [farm.enqueue(chores.wait, farm.file("go")) for _ in range(6)]
    jobs += [farm.enqueue(chores.note) for _ in range(6)]
    wait_until(lambda: len(farm.runs(word="began")) == 6)
    if seconds > 5:
        time.sleep(28)  # shortly before the leases are to be renewed
    with writer_taken(farm):
        time.sleep(seconds / 2)
        farm.make("go")  # outcomes that cannot be written, too
        time.sleep(seconds / 2)
    farm.wait_finished()
    assert {tuple(farm.outcomes(job)) for job in jobs} == {("acked",)}
    assert set(Counter(run.job_id for run in farm.runs(word="began")).values()) == {1}
    assert set(Job.objects.values_list("attempt", flat=True)) == {1}


def test_the_log_is_cut_once_a_reader_with_an_old_snapshot_has_ended(farm: Farm) -> None:
    limit = 300_000
    farm.variables = {
        "DJANGO_SETTINGS_MODULE": "tests.power.settings",
        INIT_VARIABLE: f"PRAGMA journal_size_limit={limit}; PRAGMA wal_autocheckpoint=50",
    }
    log = farm.database.with_name(farm.database.name + "-wal")
    farm.work(concurrency=4)
    with closing(sqlite3.connect(farm.database, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM relay_queue_job").fetchone()
        for _ in range(60):
            farm.enqueue(chores.give_back, "x" * 20_000)
        # The last jobs are done by workers whose connections know the limit.
        farm.wait_finished()
        assert log.stat().st_size > 2 * limit, "the reader kept the log from being cut"
        last = [farm.enqueue(chores.wait, farm.file("go")) for _ in range(4)]
        for job in last:
            farm.wait_runs(job, word="began")
        reader.execute("COMMIT")
    farm.make("go")
    wait_until(lambda: log.stat().st_size <= limit, message=lambda: str(log.stat().st_size))
    farm.wait_finished()


# --- The clock and the scheduler ----------------------------------------------------------------

HOUR, DAY = 3_600, 86_400


@pytest.mark.parametrize("seconds", [HOUR, -HOUR, DAY, -DAY])
def test_no_job_is_lost_when_the_clock_of_all_workers_jumps(farm: Farm, seconds: int) -> None:
    farm.drive("jump_clock", farm.file("offset"), processes=2)
    running = farm.enqueue(chores.wait_first_time, farm.file("go"))
    retrying = farm.enqueue(chores.fail_for_a_second)
    farm.wait_runs(running, word="began")
    farm.wait_state(retrying, "retrying", "succeeded")
    Path(farm.file("offset")).write_text(str(seconds))
    during = farm.enqueue(chores.note)
    assert farm.wait_state(during, "succeeded").attempt == 1
    farm.make("go")
    farm.wait_state(running, "succeeded")
    Path(farm.file("offset")).write_text("0")
    farm.do(store.run_now, [retrying])
    farm.wait_finished()
    for job in (running, retrying, during):
        assert farm.outcomes(job).count("acked") == 1
        assert {run.epoch for run in farm.runs(job)} == {lease.id for lease in farm.leases(job)}


@pytest.mark.parametrize("leases", [1.5, 10])
def test_a_worker_that_was_stopped_for_some_leases_is_refused_when_it_comes_back(
    farm: Farm, leases: float
) -> None:
    lease_seconds = 0.5
    farm.relay["MIN_LEASE_SECONDS"] = lease_seconds
    farm.work(lease=lease_seconds)
    old = farm.worker()
    job = farm.enqueue(chores.wait_first_time, farm.file("go"))
    farm.wait_runs(job, word="began")
    farm.work()
    with stopped(old):
        time.sleep(leases * lease_seconds)
        farm.wait_state(job, "succeeded")
        done = Job.objects.filter(pk=job).values().get()
        farm.make("go")
    late = farm.wait_refused(farm.leases(job)[0].id)
    assert (late.outcome, late.refused_verb) == ("expired", "ack")
    assert Job.objects.filter(pk=job).values().get() == done
    assert farm.outcomes(job).count("acked") == 1
    # It works on as if nothing had been; leases as short as its own may run out under load.
    after = [farm.enqueue(chores.wait, farm.file("go"), max_attempts=50) for _ in range(8)]
    for number in after:
        farm.wait_state(number, "succeeded")


def test_a_worker_stopped_with_the_writer_in_hand_is_killed_and_holds_up_nobody_for_long(
    farm: Farm,
) -> None:
    """As by a debugger, at the worst moment: nobody else can write a word."""
    farm.relay["GATE_HOLD_SECONDS"] = 2
    farm.make("freeze")
    frozen = farm.drive("freeze_in_claim", farm.file("freeze"))
    first = farm.worker()
    farm.work()
    jobs = [farm.enqueue(chores.note) for _ in range(4)]
    wait_until(lambda: not os.path.exists(farm.file("freeze")))
    for job in jobs:
        assert farm.wait_state(job, "succeeded").attempt == 1
    assert not is_alive(first)
    farm.wait_logged(frozen, "it holds the database's writer gate")


# --- Signals and names --------------------------------------------------------------------------

FIRST_HALF = len(stopping.POINTS) // 2


@pytest.mark.parametrize("points", [stopping.POINTS[:FIRST_HALF], stopping.POINTS[FIRST_HALF:]])
def test_sigterm_at_any_point_of_start_claim_and_end_is_a_polite_stop(
    farm: Farm, points: tuple[str, ...]
) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 60
    jobs = {
        point: [farm.enqueue(chores.note, queue_name=point) for _ in range(2)] for point in points
    }
    wanted = json.dumps([(point, point, str(farm.directory)) for point in points])
    process = farm.run_module("tests.process.stopping", wanted)
    wait_until(lambda: process.poll() is not None, message=lambda: farm.log(process))
    codes = json.loads(farm.log(process).splitlines()[-1])
    assert codes == dict.fromkeys(points, 0), farm.log(process)
    for point, ids in jobs.items():
        assert os.path.exists(farm.file(f"told {point}")), f"nobody came to {point}"
        for job in ids:
            # What was claimed was finished; the rest was never touched.
            outcomes, state = farm.outcomes(job), farm.job(job).state
            assert (outcomes, state) in [([], "ready"), (["acked"], "succeeded")], point
            assert len(farm.runs(job)) == len(outcomes), point
    farm.work()
    farm.wait_finished()
    assert {tuple(farm.outcomes(job)) for ids in jobs.values() for job in ids} == {("acked",)}


def test_a_worker_that_is_replaced_while_the_writer_is_held_waits_as_long_as_it_takes(
    farm: Farm,
) -> None:
    farm.relay["READY_TIMEOUT_SECONDS"] = 1
    supervisor = farm.work(processes=2)
    with writer_taken(farm):
        os.kill(farm.workers()[0], signal.SIGKILL)
        # Said after five seconds: five times as long as a start may take.
        wait_until(lambda: "takes no writes" in farm.log(supervisor), message=farm.everything)
    jobs = [farm.enqueue(chores.wait, farm.file("go")) for _ in range(8)]  # all slots of both
    for job in jobs:
        farm.wait_runs(job)
    farm.make("go")
    farm.wait_finished()
    assert farm.log(supervisor).count("starting another") == 1, "only the killed one was replaced"


def test_a_worker_that_hangs_at_its_start_is_replaced(farm: Farm) -> None:
    farm.relay["READY_TIMEOUT_SECONDS"] = 1.5
    farm.make("hang")
    job = farm.enqueue(chores.note)
    preparation = ["hang_in_boot", farm.file("hang")]
    workers = farm.run_module("tests.process.driver", *preparation, *farm.command())
    wait_until(
        lambda: "not ready within 1.5 s" in farm.log(workers), message=lambda: farm.log(workers)
    )
    os.unlink(farm.file("hang"))
    assert farm.wait_state(job, "succeeded").attempt == 1


def test_two_workers_of_one_name_are_two_workers(farm: Farm) -> None:
    farm.work("--name=twin", concurrency=1)
    farm.work("--name=twin", concurrency=1)
    first, second = farm.workers()
    jobs = [farm.enqueue(chores.wait_first_time, farm.file("go")) for _ in range(2)]
    owners = {farm.wait_runs(job)[0].pid: job for job in jobs}
    assert set(owners) == {first, second}
    os.kill(first, signal.SIGKILL)
    lost, kept = owners[first], owners[second]
    wait_until(lambda: farm.outcomes(lost)[0] == "lost", message=lambda: farm.story(lost))
    farm.make("go")
    farm.wait_finished()
    assert (farm.outcomes(lost), farm.outcomes(kept)) == (["lost", "acked"], ["acked"])
    assert set(Lease.objects.values_list("worker__name", flat=True)) == {"twin"}


# --- Upgrades -----------------------------------------------------------------------------------

ENQUEUE = """
import sys
from tests.process import chores
for path in sys.argv[2:]:
    chores.wait.enqueue(sys.argv[1], path)
"""


def test_old_and_new_workers_share_the_work_across_a_migration(
    database_file: Path, tmp_path: Path
) -> None:
    old, new = Farm(database_file, tmp_path), Farm(database_file, tmp_path)
    new.logs = tmp_path / "new-logs"
    new.variables = {"DJANGO_SETTINGS_MODULE": "tests.process.upgraded.settings"}
    try:
        old.python(ENQUEUE, old.effects, old.file("migrated"))
        before = old.spawn(*old.command(concurrency=1))
        wait_until(lambda: old.runs(word="began"), message=lambda: old.log(before))
        new.manage("migrate", "--verbosity=0")
        assert ("note",) in old.rows("SELECT name FROM pragma_table_info('relay_queue_job')")
        old.make("migrated")
        # Two jobs that wait for each other: an old and a new worker must take one each.
        after = new.spawn(*new.command(concurrency=1))
        old.python(ENQUEUE, old.effects, old.file("go"))
        new.python(ENQUEUE, new.effects, new.file("go"))
        wait_until(lambda: len(old.runs(word="began")) == 3, message=lambda: new.log(after))
        assert len({run.pid for run in old.runs(word="began")}) == 2
        old.make("go")
        wait_until(lambda: outcomes_of(old) == [("acked", 1)] * 3, message=lambda: old.log(before))
        assert "Traceback" not in old.log(before) + new.log(after)
        assert (old.stop(before), new.stop(after)) == (0, 0)
        assert new.manage("relay", "verify").returncode == 0
    finally:
        new.close()
        old.close()


def outcomes_of(farm: Farm) -> list[Any]:
    """Return the outcomes and attempts of all leases."""
    return farm.rows("SELECT outcome, attempt FROM relay_queue_lease ORDER BY id")
