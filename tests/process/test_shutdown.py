"""How workers end: one polite stop, a second word at once, orphans, and the limits of the options."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest

from relay_queue import clock, store
from relay_queue.lab.project import freeze
from relay_queue.models import Job, Worker
from relay_queue.states import WorkerOrder
from relay_queue.worker.pacing import PROBE_SECONDS
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, is_alive, on_each_engine, writer_taken

# In which a worker would have claimed what it must not, in seconds.
CLAIM_SECONDS = 0.3


@pytest.mark.parametrize("to_group", [False, True], ids=["supervisor", "group"])
def test_one_signal_lets_the_running_job_finish_and_claims_nothing_after(
    farm: Farm, to_group: bool
) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 30
    workers = farm.work(processes=2, concurrency=1)
    running = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(running, word="began")
    os.killpg(workers.pid, signal.SIGTERM) if to_group else workers.terminate()
    farm.wait_told(workers)
    # The worker that had nothing to do leaves first; the other one's place is free later.
    wait_until(lambda: len(farm.workers()) == 1)
    waiting = farm.enqueue(chores.note)
    farm.make("go")
    assert workers.wait(60) == 0, farm.log(workers)
    assert (farm.job(running).state, farm.outcomes(running)) == ("succeeded", ["acked"])
    assert (farm.job(waiting).state, farm.leases(waiting)) == ("ready", [])
    assert set(Worker.objects.values_list("stop_reason", flat=True)) == {"stopped"}


def test_workers_that_wait_for_a_locked_database_can_be_stopped(farm: Farm) -> None:
    with writer_taken(farm):
        workers = farm.spawn(*farm.command(processes=2))
        wait_until(lambda: len(farm.pids()) == 3)
        workers.terminate()
        assert workers.wait(60) == 0, farm.log(workers)


def test_a_stopping_worker_does_not_wait_for_functions_whose_lease_is_over(farm: Farm) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 600
    workers = farm.work(concurrency=2)
    stuck = farm.enqueue(chores.wait, farm.file("never"), timeout_seconds=0.1, max_attempts=1)
    farm.wait_state(stuck, "dead")
    workers.terminate()
    assert workers.wait(60) == 0, farm.log(workers)


@on_each_engine
def test_a_second_signal_hands_back_at_once_and_uncharged(farm: Farm) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 600
    workers = farm.work(concurrency=2)
    jobs = [farm.enqueue(chores.wait, farm.file("never")) for _ in range(2)]
    for job in jobs:
        farm.wait_runs(job)
    os.killpg(workers.pid, signal.SIGINT)
    farm.wait_told(workers)  # two signals at once are one
    assert workers.poll() is None, "the first signal lets jobs finish"
    os.killpg(workers.pid, signal.SIGINT)
    assert workers.wait(60) == 0, farm.log(workers)
    for job in jobs:
        assert (farm.job(job).state, farm.job(job).attempt) == ("ready", 0)
        assert farm.outcomes(job) == ["released"]


def test_a_job_that_was_handed_back_runs_again_with_its_whole_budget(farm: Farm) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 0
    workers = farm.work()
    job = farm.enqueue(chores.wait, farm.file("go"), max_attempts=1)
    farm.wait_runs(job, word="began")
    workers.terminate()
    assert workers.wait(60) == 0, farm.log(workers)
    farm.make("go")
    farm.work()
    assert farm.wait_state(job, "succeeded").attempt == 1
    assert farm.outcomes(job) == ["released", "acked"]


@on_each_engine
def test_workers_finish_and_leave_when_their_supervisor_is_killed(farm: Farm) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 30
    supervisor = farm.work(processes=2, concurrency=1)
    pids = farm.workers()
    running = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(running, word="began")
    supervisor.kill()
    supervisor.wait()
    # The worker that had nothing to do leaves first; the other one's place is free later.
    wait_until(lambda: len(farm.workers()) == 1)
    waiting = farm.enqueue(chores.note)
    farm.make("go")
    assert farm.wait_state(running, "succeeded").attempt == 1
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert (farm.job(waiting).state, farm.workers()) == ("ready", [])


def test_claims_that_wait_for_their_thread_are_handed_back_too(farm: Farm) -> None:
    """Coroutines and functions share the places; what has not begun is released like the rest."""
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 0
    workers = farm.work(concurrency=8)
    jobs = [farm.enqueue(chores.wait, farm.file("never")) for _ in range(8)]
    jobs += [farm.enqueue(chores.wait_asynchronously, farm.file("never")) for _ in range(8)]
    wait_until(lambda: Job.objects.filter(state="running").count() == 8)
    workers.terminate()
    assert workers.wait(60) == 0, farm.log(workers)
    assert set(Job.objects.values_list("state", "attempt")) == {("ready", 0)}
    assert {outcome for job in jobs for outcome in farm.outcomes(job)} == {"released"}


def test_a_worker_under_load_stops_politely(farm: Farm) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 30
    with store.transaction() as tx:
        task = store.new_job(task=chores.note.module_path, args=[farm.effects])
        store.enqueue_many(tx, [task] * 3000)
    workers = farm.work(processes=2)
    wait_until(lambda: len(farm.runs()) > 100)
    os.killpg(workers.pid, signal.SIGTERM)
    assert workers.wait(60) == 0, farm.log(workers)
    succeeded = Job.objects.filter(state="succeeded").count()
    assert len(farm.runs()) == succeeded, "every run was acked, and nothing ran twice"
    assert Job.objects.filter(state="ready", attempt=0).count() == 3000 - succeeded


@on_each_engine
def test_drain_ends_when_nothing_is_left_retries_included(farm: Farm) -> None:
    jobs = [farm.enqueue(chores.fail_times, 1) for _ in range(20)]
    slow = farm.enqueue(chores.fail_for_a_second)
    later = farm.enqueue(chores.note, run_after=clock.now() + timedelta(days=1))
    farm.manage(*farm.command(processes=2), "--drain")
    assert {farm.job(job).state for job in [*jobs, slow]} == {"succeeded"}
    assert farm.job(later).state == "scheduled"


def test_drain_waits_for_nobody_elses_jobs(farm: Farm) -> None:
    mine = farm.enqueue(chores.note, queue_name="mine")
    theirs = farm.enqueue(chores.note, queue_name="theirs")
    farm.manage(*farm.command(), "--drain", "--queue", "mine")
    assert (farm.job(mine).state, farm.job(theirs).state) == ("succeeded", "ready")
    farm.manage(*farm.command(), "--drain", "--exclude-queue", "theirs")
    assert farm.job(theirs).state == "ready"


@on_each_engine
def test_drain_of_one_backend_does_not_wait_for_jobs_of_another(farm: Farm) -> None:
    mine = farm.enqueue(chores.note, backend="other")
    theirs = farm.enqueue(chores.note)
    workers = farm.work("--drain", "--backend", "other")
    farm.wait_state(mine, "succeeded")
    wait_until(lambda: workers.poll() is not None, message=lambda: farm.log(workers))
    assert (workers.returncode, farm.job(theirs).state) == (0, "ready")


def test_a_worker_of_one_backend_leaves_jobs_of_another(farm: Farm) -> None:
    farm.work("--backend", "other")
    theirs = farm.enqueue(chores.note)
    mine = farm.enqueue(chores.note, backend="other")
    farm.wait_state(mine, "succeeded")
    assert (farm.job(theirs).state, farm.leases(theirs)) == ("ready", [])


def test_a_process_is_replaced_after_max_jobs(farm: Farm) -> None:
    farm.work("--max-jobs=5", concurrency=2)
    for _ in range(20):
        farm.enqueue(chores.note)
    farm.wait_finished()
    shares = [sum(run.pid == pid for run in farm.runs()) for pid in {r.pid for r in farm.runs()}]
    assert max(shares) == 5
    assert sum(shares) == 20


@on_each_engine
def test_queues_are_served_in_turn_and_excluded_ones_not_at_all(farm: Farm) -> None:
    jobs = {name: farm.enqueue(chores.note, queue_name=name) for name in ("a", "b", "c")}
    farm.work("--exclude-queue", "b")
    farm.wait_state(jobs["a"], "succeeded")
    farm.wait_state(jobs["c"], "succeeded")
    late = farm.enqueue(chores.note, queue_name="made later")
    farm.wait_state(late, "succeeded")
    assert farm.leases(jobs["b"]) == []


def order(farm: Farm, what: WorkerOrder | None, *names: str) -> list[int]:
    """Give an order to the workers of these names that have not ended, or to all."""
    live = Worker.objects.filter(stopped_at=None)
    ids = list((live.filter(name__in=names) if names else live).values_list("id", flat=True))
    return farm.do(store.order_workers, ids, what)


@on_each_engine
def test_a_quiet_worker_finishes_what_it_runs_claims_nothing_and_serves_again(farm: Farm) -> None:
    workers = farm.work(concurrency=1)
    running = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(running, word="began")
    order(farm, WorkerOrder.QUIET)
    # From then on it reads the order before its only place is free again.
    time.sleep(PROBE_SECONDS)
    waiting = farm.enqueue(chores.note)
    farm.make("go")
    farm.wait_state(running, "succeeded")
    time.sleep(CLAIM_SECONDS)
    assert (farm.job(waiting).state, farm.leases(waiting)) == ("ready", [])
    assert workers.poll() is None
    order(farm, None)
    farm.wait_state(waiting, "succeeded")


@on_each_engine
def test_a_worker_ordered_to_stop_finishes_and_is_not_replaced_but_its_sibling_stays(
    farm: Farm,
) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 30
    workers = farm.work("--name=w", concurrency=1, processes=2)
    running = [farm.enqueue(chores.wait, farm.file("go")) for _ in range(2)]
    for job_id in running:
        farm.wait_runs(job_id, word="began")
    assert len(order(farm, WorkerOrder.STOP, "w-1")) == 1
    # Nothing takes the first one back any more.
    assert order(farm, WorkerOrder.QUIET, "w-1") == []
    time.sleep(PROBE_SECONDS)
    assert len(farm.workers()) == 2, "it has jobs to finish"
    farm.make("go")
    wait_until(lambda: len(farm.workers()) == 1, message=lambda: farm.log(workers))
    assert [farm.wait_state(job_id, "succeeded").attempt for job_id in running] == [1, 1]
    first = Worker.objects.get(name="w-1")
    assert first.stop_reason == "stopped by an operator"
    wait_until(lambda: not is_alive(first.pid))
    assert farm.wait_state(farm.enqueue(chores.note), "succeeded").attempt == 1
    order(farm, WorkerOrder.STOP)
    assert workers.wait(60) == 0, farm.log(workers)
    assert Worker.objects.filter(name__startswith="w-").count() == 2, "none was started anew"


def test_an_order_to_a_killed_worker_does_not_bind_the_one_that_replaces_it(farm: Farm) -> None:
    farm.work()
    pid = farm.worker()
    freeze(pid)  # or it would obey before it is killed
    order(farm, WorkerOrder.STOP)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: farm.workers() not in ([], [pid]), message=farm.everything)
    assert farm.wait_state(farm.enqueue(chores.note), "succeeded").attempt == 1
    dead = Worker.objects.get(pid=pid)
    wait_until(lambda: Worker.objects.get(pid=pid).stopped_at is not None, message=farm.everything)
    assert farm.do(store.order_workers, [dead.pk], WorkerOrder.QUIET) == []
