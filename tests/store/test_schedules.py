"""Schedules: declared, fired once for each slot, missed, overlapping, paused and retired."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from relay_queue import store
from relay_queue.exceptions import InvalidSchedule, UnknownTask
from relay_queue.models import Job, Schedule, ScheduleRun
from relay_queue.query import looks
from relay_queue.store.schedules import MOST_MISSED, UNKNOWN_TASK, Declared
from relay_queue.timing import slot_of
from relay_queue.worker.outcome import describe
from tests.store.actions import (
    START,
    Wall,
    ack,
    after,
    assert_counters_exact,
    cancel,
    claim_one,
    do,
    enqueue,
    nack,
    nothing_written,
    read,
    rows,
)

pytestmark = pytest.mark.usefixtures("wall")

MINUTE = timedelta(minutes=1)
FIRST = after(60)
"""The first slot of the schedules here, which run every minute from the first on."""


def declared(name: str = "tick", **columns: Any) -> Declared:
    plain: Mapping[str, Any] = {
        "queue": "default",
        "backend": "default",
        "task": "tests.tasks.noop",
        "payload": '{"args":[7],"kwargs":{}}',
        "priority": 3,
        "max_attempts": 2,
        "lease_seconds": 60.0,
        "timeout_seconds": None,
        "backoff_base_seconds": 1.0,
        "backoff_max_seconds": 300.0,
        "backoff_jitter": "none",
        "cron": "",
        "zone": "",
        "every_seconds": 60.0,
        "start_at": FIRST,
        "end_at": None,
        "jitter_seconds": 0.0,
        "missed": "once",
        "missed_window_seconds": 86_400.0,
        "overlap": "allow",
    }
    return Declared(name, {**plain, **columns})


def sync(*schedules: Declared, source: str = "code:tests") -> store.Synced:
    synced: store.Synced = do(store.sync_schedules, source, schedules)
    return synced


def fire() -> int:
    fired: int = do(store.fire_schedules)
    return fired


def row(name: str = "tick") -> Schedule:
    return rows(Schedule).get(name=name)


def runs() -> list[tuple[str, int, datetime]]:
    """Return the outcome, the number of slots and the slot of each run, the oldest first."""
    found = rows(ScheduleRun).order_by("slot_at", "id")
    return [(run.outcome, run.n, run.slot_at) for run in found]


def slots() -> list[datetime | None]:
    """Return the slots that the jobs stand for, in the order of the jobs."""
    return [slot_of(job.idempotency_key) for job in rows(Job).order_by("id")]


# --- Declared -----------------------------------------------------------------------------------


def test_a_schedule_is_written_once_and_changed_only_when_the_code_is(wall: Wall) -> None:
    assert sync(declared()).added == ["tick"]
    assert row().next_at == FIRST
    wall.advance(90)
    with nothing_written():
        same = sync(declared())
    assert (same.added, same.changed, same.retired) == ([], [], [])
    assert sync(declared(priority=9)).changed == ["tick"]
    assert (row().priority, row().next_at) == (9, FIRST), "its slots go on as they were"


def test_a_schedule_that_is_timed_in_another_way_begins_from_now(wall: Wall) -> None:
    sync(declared())
    wall.advance(3_600)
    sync(declared(every_seconds=None, start_at=None, cron="30 * * * *", zone="Europe/Berlin"))
    assert row().next_at == after(3_600).replace(minute=30, second=0, microsecond=0) + (
        timedelta(hours=after(3_600).minute >= 30)
    )
    assert fire() == 0


def test_a_schedule_that_the_code_does_not_declare_any_more_retires_and_can_come_back(
    wall: Wall,
) -> None:
    sync(declared("a"), declared("b"))
    wall.advance(61)
    assert sync(declared("a")).retired == ["b"]
    assert (row("b").retired_at, row("b").next_at) == (after(61), None)
    assert fire() == 1
    wall.advance(3_600)
    assert sync(declared("a"), declared("b")).changed == ["b"]
    assert row("b").next_at == after(3_720), "what it has missed while it was away does not run"


def test_schedules_of_another_project_are_left_alone_and_their_names_are_taken() -> None:
    sync(declared("a"), source="code:shop")
    with nothing_written(), pytest.raises(InvalidSchedule, match="belongs to code:shop"):
        sync(declared("b"), declared("a"))
    assert sync(declared("b")).retired == []


# --- Fired --------------------------------------------------------------------------------------


def test_a_slot_makes_one_job_with_the_terms_of_the_schedule(wall: Wall) -> None:
    sync(declared())
    assert fire() == 0
    wall.advance(60)
    assert fire() == 1
    (job,) = rows(Job)
    assert (job.task, job.payload, job.priority) == (
        "tests.tasks.noop",
        '{"args":[7],"kwargs":{}}',
        3,
    )
    assert (job.max_attempts, job.state, job.run_after) == (2, "ready", None)
    assert slots() == [FIRST]
    assert runs() == [("enqueued", 1, FIRST)]
    assert rows(ScheduleRun).get().job_id == job.pk == row().last_job_id
    assert (row().last_slot_at, row().next_at) == (FIRST, FIRST + MINUTE)
    assert fire() == 0
    assert claim_one().job_id == job.pk
    assert_counters_exact()


def test_a_slot_that_was_fired_is_not_fired_again_whatever_the_row_says(wall: Wall) -> None:
    """As after a restored backup of one table, a hand edit, or a clock that was set back."""
    sync(declared())
    wall.advance(60)
    fire()
    rows(Schedule).update(next_at=FIRST)
    assert fire() == 1
    assert (rows(Job).count(), runs()) == (1, [("enqueued", 1, FIRST)])
    rows(Schedule).update(next_at=FIRST)
    rows(ScheduleRun).delete()
    assert fire() == 1
    assert rows(Job).count() == 1, "the key of the job is the second guard"
    assert row().next_at == FIRST + MINUTE


def test_a_loop_is_told_when_the_next_slot_comes(wall: Wall) -> None:
    assert looks.next_times()[0] is None
    sync(declared())
    assert looks.next_times()[0] == FIRST
    enqueue(run_after=after(30))
    assert looks.next_times()[0] == after(30)
    enqueue(run_after=after(90))
    rows(Job).filter(available_at=after(30)).delete()
    assert looks.next_times()[0] == FIRST


def test_jitter_is_the_same_for_all_and_no_longer_than_it_may_be(wall: Wall) -> None:
    sync(declared("a", jitter_seconds=20.0), declared("b", jitter_seconds=20.0))
    wall.advance(60)
    fire()
    due = {j.idempotency_key[9]: j.run_after - FIRST for j in rows(Job)}
    assert due["a"] != due["b"]
    assert all(timedelta(0) < delay < timedelta(seconds=20) for delay in due.values())
    first = dict(due)
    rows(ScheduleRun).delete()
    rows(Job).delete()
    rows(Schedule).update(next_at=FIRST, last_job_id=None)
    fire()
    assert {j.idempotency_key[9]: j.run_after - FIRST for j in rows(Job)} == first


def test_the_last_slot_is_the_one_before_the_end(wall: Wall) -> None:
    sync(declared(end_at=FIRST + MINUTE))
    wall.advance(125)
    fire()
    assert [slot for _, _, slot in runs()] == [FIRST, FIRST + MINUTE]
    assert row().next_at is None


# --- Missed -------------------------------------------------------------------------------------


def test_of_missed_slots_the_newest_runs_and_the_others_are_counted(wall: Wall) -> None:
    sync(declared())
    wall.advance(60 * 10 + 30)
    fire()
    late, in_time = FIRST + 8 * MINUTE, FIRST + 9 * MINUTE
    assert slots() == [late, in_time]
    assert runs() == [
        ("missed", 8, FIRST + 7 * MINUTE),
        ("enqueued", 1, late),
        ("enqueued", 1, in_time),
    ]
    assert row().next_at == FIRST + 10 * MINUTE


def test_missed_slots_are_skipped_where_the_schedule_says_so(wall: Wall) -> None:
    sync(declared(missed="skip"))
    wall.advance(60 * 10 + 30)
    fire()
    assert slots() == [FIRST + 9 * MINUTE]
    assert runs()[0] == ("missed", 9, FIRST + 8 * MINUTE)


def test_all_missed_slots_run_oldest_first_up_to_a_bound(wall: Wall) -> None:
    sync(declared(missed="all"))
    wall.advance(60 * (MOST_MISSED + 50) + 30)
    fire()
    made = slots()
    assert len(made) == MOST_MISSED + 1
    assert made == sorted(made, key=lambda slot: slot or START)
    (missed,) = [run for run in runs() if run[0] == "missed"]
    assert missed[1] == 49


def test_slots_out_of_the_window_never_run(wall: Wall) -> None:
    sync(declared(missed="all", missed_window_seconds=180.0))
    wall.advance(60 * 10 + 30)
    fire()
    assert slots() == [FIRST + n * MINUTE for n in (7, 8, 9)]
    assert runs()[0][:2] == ("missed", 7)


def test_a_schedule_that_slept_for_a_year_looks_back_for_a_thousand_slots(wall: Wall) -> None:
    sync(declared(missed="skip"))
    wall.advance(366 * 86_400)
    fire()
    (missed,) = [run for run in rows(ScheduleRun) if run.outcome == "missed"]
    assert missed.n == 998, "and two are not late"
    assert "1,000 slots or more" in missed.reason


# --- Overlap ------------------------------------------------------------------------------------


def test_a_slot_is_skipped_while_the_job_before_is_unfinished(wall: Wall) -> None:
    sync(declared(overlap="skip"))
    for seconds in (60, 60):
        wall.advance(seconds)
        fire()
    assert runs() == [("enqueued", 1, FIRST), ("skipped", 1, FIRST + MINUTE)]
    (first,) = rows(Job)
    assert rows(ScheduleRun).get(outcome="skipped").reason == f"job {first.pk} is unfinished"
    nack(claim_one())
    wall.advance(60)
    fire()
    assert runs()[-1][0] == "skipped", "a job that is tried again is unfinished, too"
    cancel(first.pk)
    wall.advance(60)
    fire()
    assert runs()[-1][0] == "enqueued"


def test_the_job_before_is_cancelled_where_the_schedule_says_so(wall: Wall) -> None:
    sync(declared(overlap="cancel"))
    wall.advance(60)
    fire()
    held = claim_one()
    wall.advance(60)
    fire()
    assert read(held.job_id).state == "cancelled"
    assert ack(held).reason, "its late result is refused"
    assert slots() == [FIRST, FIRST + MINUTE]
    assert_counters_exact()


def test_the_job_before_is_not_cancelled_for_one_that_the_queue_refuses(wall: Wall) -> None:
    sync(declared(overlap="cancel"))
    wall.advance(60)
    fire()
    held = claim_one()
    enqueue()
    do(store.set_limits, "default", capacity=1)
    wall.advance(60)
    fire()
    assert read(held.job_id).state == "running"
    assert rows(ScheduleRun).get(slot_at=FIRST + MINUTE).outcome == "refused"
    assert_counters_exact()


# --- What cannot be fired ---------------------------------------------------------------------


def test_a_slot_that_the_queue_refuses_says_why_and_the_next_comes_as_usual(wall: Wall) -> None:
    enqueue()
    do(store.set_limits, "default", capacity=1)
    sync(declared())
    wall.advance(60)
    fire()
    (run,) = rows(ScheduleRun)
    assert (run.outcome, run.job_id) == ("refused", None)
    assert "admits 1 unfinished" in run.reason
    assert (row().next_at, row().fault) == (FIRST + MINUTE, "")
    do(store.set_limits, "default", capacity=None)
    wall.advance(60)
    fire()
    assert slots()[-1] == FIRST + MINUTE


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cron": "nonsense", "zone": "UTC"}, "InvalidSchedule: the cron expression 'nonsense'"),
        ({"cron": "@daily", "zone": "Mars"}, "InvalidSchedule: there is no time zone 'Mars'"),
        ({"payload": "{"}, ""),
        ({"missed": "odd"}, "ValueError: 'odd' is not a valid Missed"),
        ({"overlap": "odd"}, "ValueError: 'odd' is not a valid Overlap"),
        ({"backoff_jitter": "odd"}, ""),
    ],
)
def test_a_schedule_that_was_altered_stands_still_and_sinks_no_other(
    wall: Wall, change: dict[str, Any], why: str
) -> None:
    sync(declared("a"), declared("bad"), declared("c"))
    rows(Schedule).filter(name="bad").update(**change)
    wall.advance(60)
    assert fire() == 3
    assert len(slots()) == 2
    bad = row("bad")
    if why:
        assert bad.next_at is None
        assert bad.fault.startswith(why)
    else:
        assert rows(ScheduleRun).get(schedule_id=bad.pk).outcome == "refused"
    sync(declared("a"), declared("bad"), declared("c"))
    assert (row("bad").fault, row("bad").next_at) == ("", FIRST + MINUTE)
    assert_counters_exact()


def test_a_schedule_whose_task_is_gone_makes_one_dead_letter_and_stands_still(wall: Wall) -> None:
    sync(declared())
    wall.advance(60)
    fire()
    nack(claim_one(), fatal=True, message="UnknownTask: 'tests.tasks.noop' is nothing, not a task.")
    for _ in range(3):
        wall.advance(60)
        fire()
    assert rows(Job).count() == 1
    assert (row().next_at, row().fault[:25]) == (None, "its task tests.tasks.noop")
    sync(declared())  # which a sync does not do unless the code has the task again
    wall.advance(60)
    fire()
    assert rows(Job).count() == 2
    nack(claim_one(), fatal=True, message="UnknownTask: gone once more")
    wall.advance(60)
    fire()
    assert rows(Job).count() == 2
    assert row().next_at is None


def test_a_job_that_dies_for_want_of_its_task_says_so_as_schedules_expect() -> None:
    enqueue()
    told = describe(claim_one(), UnknownTask("'shop.tasks.gone' is nothing, not a task."))
    assert told.message.startswith(UNKNOWN_TASK)


# --- An operator ----------------------------------------------------------------------------------


def test_a_pause_is_no_backlog_and_outlives_a_deploy(wall: Wall) -> None:
    sync(declared())
    assert do(store.pause_schedule, "tick") is True
    assert do(store.pause_schedule, "tick") is False
    wall.advance(600)
    assert fire() == 0
    sync(declared(priority=7))
    assert (row().paused_at, row().next_at) == (START, None)
    assert do(store.resume_schedule, "tick") is True
    assert do(store.resume_schedule, "tick") is False
    assert row().next_at == after(660)
    assert fire() == 0
    assert runs() == []


def test_a_run_by_hand_minds_neither_pause_nor_overlap_and_moves_no_slot(wall: Wall) -> None:
    sync(declared(overlap="skip", jitter_seconds=20.0))
    wall.advance(60)
    fire()
    do(store.pause_schedule, "tick")
    wall.advance(5)
    job_id = do(store.run_schedule, "tick")
    assert (read(job_id).state, read(job_id).run_after) == ("ready", None)
    assert slots() == [FIRST, after(65)]
    (run,) = rows(ScheduleRun).filter(manual=True)
    assert (run.outcome, run.job_id, run.slot_at) == ("enqueued", job_id, after(65))
    assert row().next_at is None


@pytest.mark.parametrize("verb", [store.pause_schedule, store.resume_schedule, store.run_schedule])
def test_a_schedule_that_is_not_there_is_named(verb: Any) -> None:
    with nothing_written(), pytest.raises(InvalidSchedule, match="no schedule 'nightly'"):
        do(verb, "nightly")


def test_old_runs_are_pruned_but_for_the_newest(wall: Wall) -> None:
    sync(declared("a"), declared("b", end_at=FIRST))
    for _ in range(4):
        wall.advance(60)
        fire()
    assert do(store.prune_runs, after(10_000)) == 3
    assert sorted(run.slot_at for run in rows(ScheduleRun)) == [FIRST, FIRST + 3 * MINUTE]


def test_a_key_of_a_caller_that_looks_like_a_slot_is_none() -> None:
    assert slot_of("schedule:x@2026-01-01T00:00:00+00:00") == datetime(2026, 1, 1, tzinfo=UTC)
    for key in (None, "order-7", "schedule:x", "schedule:x@soon", "schedule:x@2026-01-01T00:00:00"):
        assert slot_of(key) is None
