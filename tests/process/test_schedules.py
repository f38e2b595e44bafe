"""Schedules with real workers: fired once for each slot, by whichever worker is there."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from itertools import pairwise

from relay_queue import clock, schedules, store
from relay_queue.models import Job, Schedule, ScheduleRun
from relay_queue.store.schedules import Declared
from relay_queue.timing import slot_of
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, on_each_engine

SLOTS = 12


def declare(*names: str, **columns: object) -> None:
    """Declare schedules of every second, one if none is named."""
    job = chores.nothing.get_backend().prepare(chores.nothing, [], {})  # type: ignore[attr-defined]
    plain = {
        "queue": "default",
        "backend": "default",
        "task": job.options.task,
        "payload": job.payload,
        "priority": 0,
        "max_attempts": 3,
        "lease_seconds": 5.0,
        "timeout_seconds": None,
        "backoff_base_seconds": 0.1,
        "backoff_max_seconds": 1.0,
        "backoff_jitter": "none",
        "cron": "",
        "zone": "",
        "every_seconds": 1.0,
        "start_at": None,
        "end_at": None,
        "jitter_seconds": 0.0,
        "missed": "all",
        "missed_window_seconds": 86_400.0,
        "overlap": "allow",
    }
    declared = [Declared(name, {**plain, **columns}) for name in names or ["each second"]]
    store.in_transaction(lambda tx: store.sync_schedules(tx, "code:tests", declared))


def check_each_slot_was_fired_once(farm: Farm) -> None:
    runs = list(ScheduleRun.objects.order_by("slot_at"))
    slots = [run.slot_at for run in runs]
    steps = {b - a for a, b in pairwise(slots)}
    assert steps == {timedelta(seconds=1)}, "no slot is missing, and none is there twice"
    assert {run.outcome for run in runs} == {"enqueued"}
    jobs = {job.pk: slot_of(job.idempotency_key) for job in Job.objects.all()}
    assert jobs == {run.job_id: run.slot_at for run in runs}


@on_each_engine
def test_many_workers_that_are_killed_fire_each_slot_once(farm: Farm) -> None:
    farm.work(processes=4, concurrency=2)
    declare()
    for seen in range(3, SLOTS, 3):
        wait_until(lambda seen=seen: ScheduleRun.objects.count() >= seen, message=farm.everything)
        there = [pid for pid in farm.workers() if os.path.exists(f"/proc/{pid}")]
        os.kill(there[-1], signal.SIGKILL)
    wait_until(lambda: ScheduleRun.objects.count() >= SLOTS, message=farm.everything)
    assert schedules.pause("each second")
    for job_id in Job.objects.values_list("pk", flat=True):
        farm.wait_state(job_id, "succeeded")
    check_each_slot_was_fired_once(farm)


@on_each_engine
def test_slots_that_come_while_no_worker_is_there_are_made_up_for_as_the_schedule_says(
    farm: Farm,
) -> None:
    past = clock.now() - timedelta(hours=1)
    with clock.use(lambda: past):
        # The newest slot was five minutes ago: none comes while the test runs.
        declare(every_seconds=600.0, missed="once", start_at=past - timedelta(minutes=5))
    farm.work()
    wait_until(lambda: ScheduleRun.objects.count() == 2, message=farm.everything)
    missed, made_up = ScheduleRun.objects.order_by("slot_at")
    assert (missed.outcome, missed.n) in {("missed", 5), ("missed", 6)}
    assert made_up.outcome == "enqueued"
    assert made_up.slot_at - missed.slot_at == timedelta(minutes=10)
    farm.wait_state(made_up.job_id or 0, "succeeded")


def test_a_bad_schedule_sinks_neither_a_tick_nor_the_others(farm: Farm) -> None:
    declare("bad", "each second")
    Schedule.objects.filter(name="bad").update(cron="nonsense", zone="UTC")
    farm.work()
    wait_until(lambda: ScheduleRun.objects.count() >= 3, message=farm.everything)
    schedules.pause("each second")
    bad = Schedule.objects.get(name="bad")
    assert (bad.next_at, bad.fault[:16]) == (None, "InvalidSchedule:")
    job = farm.enqueue(chores.note)
    farm.wait_state(job, "succeeded")
