"""The failure table of the design, row by row: the promise, and what the ledger says afterwards.

On PostgreSQL the rows are executed by the drill: see ``test_drill``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from django.contrib.auth.models import Group
from django.db.models import F

from relay_queue import store
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job, Lease
from relay_queue.states import ANSWERED
from tests.conftest import Project, wait_until
from tests.process import chores
from tests.process.farm import (
    SHORT_SECONDS,
    Farm,
    is_alive,
    stopped,
    threads,
    writer_taken,
)

# --- F1, F2: a worker dies --------------------------------------------------------------


def test_f1_a_job_whose_worker_died_before_its_effect_runs_on_another(farm: Farm) -> None:
    farm.work(processes=2)
    job = farm.enqueue(chores.wait_first_time, farm.file("never"))
    (first,) = farm.wait_runs(job, word="began")
    os.kill(first.pid, signal.SIGKILL)
    assert farm.wait_state(job, "succeeded").attempt == 2
    (effect,) = farm.runs(job, "ended")
    assert effect.pid != first.pid
    assert farm.outcomes(job) == ["lost", "acked"]


def test_f2_an_effect_without_an_ack_is_repeated_and_shown_as_unknown(farm: Farm) -> None:
    farm.work(processes=2)
    job = farm.enqueue(chores.wait_first_time, farm.file("never"))
    (first,) = farm.wait_runs(job, word="began")  # the line is the effect
    os.kill(first.pid, signal.SIGKILL)
    farm.wait_state(job, "succeeded")
    effects = farm.runs(job, "began")
    leases = farm.leases(job)
    assert [run.epoch for run in effects] == [lease.id for lease in leases]
    assert [run.attempt for run in effects] == [1, 2]
    assert leases[0].outcome not in ANSWERED


# --- F3, F4: somebody comes back late ----------------------------------------------------


def test_f3_an_ack_after_the_lease_ran_out_is_refused_and_recorded(farm: Farm) -> None:
    farm.work()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    with stopped(farm.worker()):
        let_run_out(job)
        farm.make("go")
    (lease, *_) = farm.leases(job)
    late = farm.wait_refused(lease.id)
    assert (late.refused_verb, late.outcome == "acked") == ("ack", False)
    assert "expired" in late.refused_reason
    assert farm.wait_state(job, "succeeded").attempt == 2
    assert farm.outcomes(job) == ["expired", "acked"]


def test_f4_a_worker_that_comes_back_after_another_took_its_job_is_refused(farm: Farm) -> None:
    farm.work(lease=1)
    old = farm.worker()
    job = farm.enqueue(chores.wait_first_time, farm.file("go"))
    farm.wait_runs(job, word="began")
    farm.work()
    with stopped(old):
        done = farm.wait_state(job, "succeeded")
        before = row_of(done)
        farm.make("go")
    late = farm.wait_refused(farm.leases(job)[0].id)
    assert (late.outcome, late.refused_verb) == ("expired", "ack")
    assert late.refused_reason == "the lease had ended: expired"
    assert row_of(farm.job(job)) == before, "a refused ack changes nothing"
    assert [run.pid == old for run in farm.runs(job, "ended")] == [False, True]


# --- F5: death inside of a transaction ----------------------------------------------------


def test_f5_a_process_that_dies_in_its_claim_has_claimed_nothing(farm: Farm) -> None:
    farm.make("die")
    farm.drive("die_after_claim", farm.file("die"))
    job = farm.enqueue(chores.note)
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert not os.path.exists(farm.file("die")), "nobody died"
    assert farm.outcomes(job) == ["acked"]
    assert len(farm.runs(job)) == 1


def test_f5_a_process_that_dies_in_its_ack_has_acked_nothing(farm: Farm) -> None:
    farm.make("die")
    farm.drive("die_after_settle", farm.file("die"))
    job = farm.enqueue(chores.note)
    assert farm.wait_state(job, "succeeded").attempt == 2
    assert farm.outcomes(job) == ["lost", "acked"]
    assert [run.epoch for run in farm.runs(job)] == [lease.id for lease in farm.leases(job)]


def test_f5_writes_of_an_atomic_function_die_with_its_process(farm: Farm) -> None:
    farm.work()
    job = farm.enqueue(chores.write_together, "f5", farm.file("never"))
    (first,) = farm.wait_runs(job, word="wrote")
    os.kill(first.pid, signal.SIGKILL)
    assert farm.wait_state(job, "succeeded").attempt == 2
    assert farm.outcomes(job) == ["lost", "acked"]
    assert Group.objects.filter(name="f5").count() == 1


# --- F6: everybody restarts ----------------------------------------------------------------


def test_f6_leases_of_the_dead_end_at_once_when_all_workers_restart(farm: Farm) -> None:
    workers = farm.work(processes=2)
    again = farm.enqueue(chores.wait_first_time, farm.file("never"))
    last = farm.enqueue(chores.wait_first_time, farm.file("never"), max_attempts=1)
    farm.wait_runs(again, word="began")
    farm.wait_runs(last, word="began")
    os.killpg(workers.pid, signal.SIGKILL)
    workers.wait()
    farm.work()
    # The leases had a minute to go.
    assert farm.wait_state(again, "succeeded").attempt == 2
    dead = farm.wait_state(last, "dead")
    assert "the worker died; the effect of this attempt is unknown" in dead.last_error
    assert (farm.outcomes(again), farm.outcomes(last)) == (["lost", "acked"], ["lost"])
    void = farm.leases(again)[0]
    assert not farm.do(store.ack, void.id, void.token).accepted
    assert farm.leases(again)[0].refused_verb == "ack"


# --- F7: failures ----------------------------------------------------------------------------


def test_f7_exhausted_jobs_are_dead_letters_and_wait_for_an_operator(farm: Farm) -> None:
    farm.work()
    job = farm.enqueue(chores.fail_times, 3)
    dead = farm.wait_state(job, "dead")
    assert (dead.attempt, dead.last_error) == (3, "ValueError: attempt 3")
    assert farm.outcomes(job) == ["failed"] * 3
    assert all(lease.error == "builtins.ValueError" for lease in farm.leases(job))
    farm.do(store.requeue, [job])
    assert farm.wait_state(job, "succeeded").attempt == 4
    assert farm.outcomes(job) == ["failed"] * 3 + ["acked"]


def test_f7_a_back_off_survives_the_death_of_all_workers(farm: Farm) -> None:
    workers = farm.work()
    job = farm.enqueue(chores.fail_for_seconds)
    due = farm.wait_state(job, "retrying").available_at
    os.killpg(workers.pid, signal.SIGKILL)
    workers.wait()
    assert farm.job(job).state == "retrying"
    farm.work()
    assert farm.wait_state(job, "succeeded").available_at == due
    first, second = farm.leases(job)
    assert first.outcome == "failed"
    assert second.acquired_at >= due


# --- F8: more work than workers ----------------------------------------------------------------


def test_f8_depth_grows_on_disk_while_leases_and_threads_stay_bounded(farm: Farm) -> None:
    farm.work(concurrency=2)
    task = chores.wait.using(queue_name="deep")
    with store.transaction() as tx:
        store.ensure_queue(tx, "deep")
        store.set_limits(tx, "deep", capacity=300, max_running=None)
    blocked = [task.enqueue(farm.effects, farm.file("go")) for _ in range(300)]
    wait_until(lambda: len(farm.runs(word="began")) == 2)
    with pytest.raises(QueueFull):
        task.enqueue(farm.effects, farm.file("go"))
    assert Lease.objects.filter(ended_at=None).count() == 2
    assert Job.objects.filter(state="ready").count() == len(blocked) - 2
    assert threads(farm.worker()) <= 2 + 2, "slots, the loop, and the waiter for the gate"
    farm.make("go")
    farm.wait_finished()
    assert Lease.objects.filter(outcome="acked").count() == 300
    assert threads(farm.worker()) <= 2 + 2


# --- F9, F10: the function does not end ----------------------------------------------------------


def test_f9_a_function_past_its_timeout_is_retried_and_its_late_result_refused(farm: Farm) -> None:
    farm.work(concurrency=2)
    job = farm.enqueue(chores.wait_first_time, farm.file("go"), timeout_seconds=SHORT_SECONDS)
    done = farm.wait_state(job, "succeeded")
    assert (done.attempt, done.result) == (2, '"attempt 2"')
    farm.make("go")
    late = farm.wait_refused(farm.leases(job)[0].id)
    assert farm.outcomes(job) == ["timed_out", "acked"]
    assert (late.refused_verb, late.refused_reason) == ("ack", "the lease had ended: timed_out")
    assert farm.job(job).result == '"attempt 2"'


def test_f10_a_job_is_cancelled_at_once_and_its_function_told(farm: Farm) -> None:
    farm.work()
    job = farm.enqueue(chores.wait_politely, farm.file("never"))
    farm.wait_runs(job, word="began")
    farm.do(store.cancel, [job])
    assert farm.job(job).state == "cancelled"
    farm.wait_runs(job, word="told")
    (lease,) = farm.leases(job)
    late = farm.wait_refused(lease.id)
    assert (late.outcome, late.refused_verb) == ("cancelled", "ack")
    cancelled = farm.job(job)
    assert (cancelled.state, cancelled.result) == ("cancelled", None)


# --- F11: told to stop ---------------------------------------------------------------------------


def test_f11_a_stopping_worker_finishes_hands_back_and_claims_nothing(farm: Farm) -> None:
    workers = farm.work("--shutdown-timeout=4", concurrency=2)
    quick = farm.enqueue(chores.wait, farm.file("go"))
    slow = farm.enqueue(chores.wait, farm.file("never"))
    farm.wait_runs(quick, word="began")
    farm.wait_runs(slow, word="began")
    workers.terminate()
    farm.wait_told(workers)
    waiting = farm.enqueue(chores.note)
    farm.make("go")
    assert workers.wait(60) == 0, farm.log(workers)
    assert farm.job(quick).state == "succeeded"
    assert (farm.job(slow).state, farm.job(slow).attempt) == ("ready", 0)
    assert farm.outcomes(slow) == ["released"]
    assert (farm.job(waiting).state, farm.outcomes(waiting)) == ("ready", [])
    assert not farm.workers()


# --- F12, F13: altered on disk -------------------------------------------------------------------


def test_f12_an_altered_payload_goes_to_no_function(farm: Farm) -> None:
    job = farm.enqueue(chores.note)
    original = farm.job(job).payload
    with closing(sqlite3.connect(farm.database)) as other, other:
        other.execute("UPDATE relay_queue_job SET payload = replace(payload, 'effects', 'effectz')")
    farm.work()
    dead = farm.wait_state(job, "dead")
    assert "ChecksumMismatch" in dead.last_error
    assert (dead.attempt, farm.leases(job), farm.runs()) == (0, [], [])
    assert farm.manage("relay", "verify", check=False).returncode == 1
    Job.objects.filter(pk=job).update(payload=original)  # so that the ledger is sound again


WORK_AND_DIE = """
import os
from tests.store import actions
for _ in range(40):
    actions.enqueue(args=["x" * 500])
held = actions.claim(40, worker_id=actions.register())
for one in held[:20]:
    actions.ack(one)
os._exit(9)
"""


def test_f13_a_torn_log_is_named_and_its_tail_dropped(project: Project) -> None:
    project.python(WORK_AND_DIE, check=False)
    log = project.database.with_name(project.database.name + "-wal")
    os.truncate(log, log.stat().st_size - 100)
    answer = project.manage("relay", "verify", check=False)
    assert answer.returncode == 1
    assert "log_torn" in answer.stdout, answer.stdout + answer.stderr
    # Opening it has dropped the last transaction, whole: one ack less, and nothing half done.
    assert project.rows("SELECT count(*) FROM relay_queue_lease WHERE outcome = 'acked'") == [(19,)]
    assert project.rows("SELECT count(*) FROM relay_queue_job WHERE state = 'succeeded'") == [(19,)]
    assert project.manage("relay", "verify", check=False).returncode == 0


@pytest.mark.parametrize("what", [b"relay_lease_one_open", b"x" * 400], ids=["schema", "payload"])
def test_f13_a_flipped_bit_is_named(project: Project, what: bytes) -> None:
    project.python(WORK_AND_DIE, check=False)
    project.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(project.database.read_bytes())
    content[content.index(what)] ^= 1
    project.database.write_bytes(content)
    answer = project.manage("relay", "verify", check=False)
    assert answer.returncode == 1, answer.stdout
    assert answer.stdout.strip(), "a fault is named, not only counted"


# --- F14: the database will not take it ------------------------------------------------------------


def test_f14_outcomes_wait_for_a_lock_that_another_program_holds(farm: Farm) -> None:
    farm.work()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    with writer_taken(farm):
        farm.make("go")
        farm.wait_runs(job, word="ended")
        time.sleep(1)  # several slices of the loop's patience
        assert farm.job(job).state == "running"
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert (farm.outcomes(job), len(farm.runs(job))) == (["acked"], 2)


def test_f14_workers_start_although_another_program_holds_the_lock(farm: Farm) -> None:
    job = farm.enqueue(chores.note)
    with writer_taken(farm):
        workers = farm.spawn(*farm.command(processes=2))
        farm.wait_logged(workers, "Relay")
        time.sleep(5)
        assert workers.poll() is None, farm.log(workers)
    farm.wait_state(job, "succeeded")
    assert "Giving up" not in farm.log(workers)


def test_f14_a_killed_worker_is_replaced_although_another_program_holds_the_lock(
    farm: Farm,
) -> None:
    workers = farm.work(processes=2)
    first, second = farm.workers()
    with writer_taken(farm):
        os.kill(first, signal.SIGKILL)
        time.sleep(8)
        assert workers.poll() is None, farm.log(workers)
        assert is_alive(second)
    wait_until(lambda: len(farm.workers()) == 2, message=lambda: farm.log(workers))


def test_f14_a_reader_that_finds_the_database_locked_costs_no_job(farm: Farm) -> None:
    workers = farm.drive("lock_reads", farm.file("lock"))
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    farm.make("lock")
    farm.enqueue(chores.note)  # a ring, and so a look
    time.sleep(1)
    os.unlink(farm.file("lock"))
    farm.make("go")
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert "Traceback" not in farm.log(workers)
    farm.wait_finished()


def test_f14_after_an_error_that_leaves_the_outcome_unknown_the_process_is_replaced(
    farm: Farm,
) -> None:
    farm.drive("break_commit", farm.file("break"), "--concurrency=2")
    first = farm.worker()
    job = farm.enqueue(chores.note)
    farm.wait_state(job, "succeeded")
    running = farm.enqueue(chores.wait_first_time, farm.file("never"))
    farm.wait_runs(running, word="began")
    farm.make("break")
    unknown = farm.enqueue(chores.note)
    wait_until(lambda: not is_alive(first))
    # It was committed, so it must not run again; what was running must.
    assert farm.wait_state(unknown, "succeeded").attempt == 1
    assert len(farm.runs(unknown)) == 1
    assert farm.wait_state(running, "succeeded").attempt == 2
    assert farm.outcomes(running) == ["lost", "acked"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("NOT TESTED: only root may mount a small file system")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], check=False)
    if done.returncode:
        pytest.skip("NOT TESTED: this system lets not even root mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_f14_outcomes_wait_for_room_on_a_full_disk(
    small_disk: Path, migrated_template: Path, tmp_path: Path
) -> None:
    database = Path(shutil.copyfile(migrated_template, small_disk / "relay.sqlite3"))
    farm = Farm(database, tmp_path)
    filler = small_disk / "filler"
    try:
        farm.python(ENQUEUE_WAIT, farm.effects, farm.file("go"), farm.file("more"))
        workers = farm.spawn(*farm.command(concurrency=1))
        wait_until(lambda: farm.runs(word="began"), message=lambda: farm.log(workers))
        fill(filler)
        farm.make("go")
        wait_until(
            lambda: "No room for the database" in farm.log(workers),
            message=lambda: farm.log(workers),
        )
        ended = farm.runs(word="ended")
        assert len(ended) == 1
        assert states_of(farm) == ["ready", "running"], "no claim without room for the outcome"
        filler.unlink()
        wait_until(lambda: states_of(farm)[-1] == "succeeded", message=lambda: farm.log(workers))
        farm.make("more")
        wait_until(lambda: states_of(farm) == ["succeeded"] * 2, message=lambda: farm.log(workers))
        outcomes = farm.rows("SELECT outcome, attempt FROM relay_queue_lease ORDER BY id")
        assert outcomes == [("acked", 1), ("acked", 1)]
        assert farm.stop(workers) == 0
        assert farm.manage("relay", "verify", check=False).returncode == 0
    finally:
        filler.unlink(missing_ok=True)
        farm.close()


# --- F15: the clock jumps ---------------------------------------------------------------------------


def test_f15_a_clock_that_jumps_ahead_ends_leases_but_no_job_is_lost(farm: Farm) -> None:
    farm.drive("jump_clock", farm.file("offset"), processes=2)
    job = farm.enqueue(chores.wait_first_time, farm.file("go"))
    farm.wait_runs(job, word="began")
    Path(farm.file("offset")).write_text("86400")
    farm.enqueue(chores.note)  # any traffic, so that somebody looks
    wait_until(lambda: farm.outcomes(job)[-1] == "acked", message=lambda: farm.story(job))
    farm.make("go")
    late = farm.wait_refused(farm.leases(job)[0].id)
    assert (late.outcome, late.refused_verb) == ("expired", "ack")
    assert farm.outcomes(job) == ["expired", "acked"]
    assert farm.job(job).state == "succeeded"


def test_f15_a_clock_that_jumps_back_delays_nothing_that_runs(farm: Farm) -> None:
    farm.drive("jump_clock", farm.file("offset"), "--lease-seconds=3", processes=2)
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job, word="began")
    hung = farm.enqueue(chores.wait_first_time, farm.file("go"), timeout_seconds=2)
    farm.wait_runs(hung, word="began")
    Path(farm.file("offset")).write_text("-86400")
    # Time limits and renewals are counted on the monotonic clock.
    wait_until(lambda: farm.outcomes(hung)[0] == "timed_out", message=lambda: farm.story(hung))
    time.sleep(1.5)
    farm.make("go")
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert farm.outcomes(job) == ["acked"]
    Path(farm.file("offset")).write_text("0")
    farm.do(store.run_now, [hung])
    farm.wait_state(hung, "succeeded")


# --- what the rows have in common ------------------------------------------------------------------

ENQUEUE_WAIT = """
import sys
from tests.process import chores
chores.wait.enqueue(sys.argv[1], sys.argv[2])
chores.wait.enqueue(sys.argv[1], sys.argv[3])
"""


def let_run_out(job_id: int) -> None:
    """Put the end of a job's lease into the past: only the next one is as long as leases are."""
    Lease.objects.filter(job=job_id, ended_at=None).update(expires_at=F("acquired_at"))


def row_of(job: Job) -> dict[str, object]:
    """Return all columns of a job."""
    return {field.attname: getattr(job, field.attname) for field in Job._meta.concrete_fields}


def fill(path: Path) -> None:
    """Write to a file until its file system is full."""
    with path.open("ab", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            try:
                while file.write(b"\0" * size) == size:
                    pass
            except OSError:
                continue


def states_of(farm: Farm) -> list[str]:
    """Return the states of all jobs, sorted."""
    return sorted(state for (state,) in farm.rows("SELECT state FROM relay_queue_job"))
