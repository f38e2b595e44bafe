"""The front door of schedules: what code may declare, and how it gets into the table."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.core.management import call_command
from django.test import override_settings

from relay_queue import clock, schedules, store
from relay_queue.exceptions import InvalidSchedule
from relay_queue.models import Job, Schedule, ScheduleRun
from relay_queue.schedules import cron, every, schedule
from relay_queue.testing import run_pending
from tests import tasks

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with no declaration, and leave none behind."""
    monkeypatch.setattr(schedules, "_declared", {})


def test_a_declared_schedule_is_in_the_table_after_migrate_and_the_task_is_as_it_was() -> None:
    task = schedule("nightly", cron("0 3 * * *", "Europe/Berlin"), args=[1], kwargs={"right": 2})(
        tasks.add
    )
    assert task is tasks.add
    call_command("migrate", verbosity=0)
    row = Schedule.objects.get()
    assert (row.name, row.cron, row.zone) == ("nightly", "0 3 * * *", "Europe/Berlin")
    assert (row.task, row.payload) == ("tests.tasks.add", '{"args":[1],"kwargs":{"right":2}}')
    assert (row.source, row.queue, row.max_attempts) == ("code:tests", "default", 3)
    assert row.next_at is not None
    assert row.next_at.astimezone(ZoneInfo("Europe/Berlin")).hour == 3


def test_settings_declare_schedules_of_tasks_of_other_packages(settings: Any) -> None:
    settings.RELAY = {
        "SCHEDULES": {
            "warm": {"task": "tests.tasks.noop", "every": 900, "queue_name": "slow"},
            "daily": {"task": "tests.tasks.noop", "cron": "@daily", "zone": "Asia/Tokyo"},
        }
    }
    assert schedules.sync().added == ["daily", "warm"]
    assert Schedule.objects.get(name="warm").queue == "slow"
    assert Schedule.objects.get(name="daily").zone == "Asia/Tokyo"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"task": "tests.tasks.noop"}, 'must have either "cron" or "every"'),
        ({"task": "tests.tasks.noop", "cron": "@daily", "every": 5}, "must have either"),
        ({"task": "tests.tasks.nothing", "every": 5}, "is nothing, not a task"),
        ({"task": "tests.tasks.noop", "every": 5, "overlapp": "skip"}, "overlapp"),
        ({"task": "tests.tasks.noop", "every": 5, "overlap": "skipp"}, "use 'skip', 'allow'"),
    ],
)
def test_settings_that_make_no_sense_change_nothing(
    settings: Any, entry: dict[str, Any], why: str
) -> None:
    settings.RELAY = {"SCHEDULES": {"good": {"task": "tests.tasks.noop", "every": 9}, "odd": entry}}
    with pytest.raises(InvalidSchedule, match=why):
        schedules.sync()
    assert not Schedule.objects.exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"missed": "later"}, "missed of schedule 's' is 'later'; use 'once', 'skip', 'all'"),
        ({"overlap": "queue"}, "overlap of schedule 's' is 'queue'; use 'skip', 'allow', 'cancel'"),
        ({"missed": "all"}, 'Use overlap="allow"'),
        ({"missed_window_seconds": -1}, "missed_window_seconds"),
        ({"jitter_seconds": 450}, "its slots are 900 seconds apart"),
        ({"start_at": datetime(2026, 1, 1)}, "start_at"),
        ({"args": [1, 2, 3]}, "tests.tasks.noop"),
        ({"kwargs": {"nothing": 1}}, "nothing"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_where_it_stands(
    options: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidSchedule, match=why):
        schedule("s", every(900), **options)(tasks.noop)


@pytest.mark.parametrize("name", ["", " a", "a" * 101, "a@b", "a!", "a\n", 5, None])
def test_a_name_that_no_schedule_can_have_is_refused(name: Any) -> None:
    with pytest.raises(InvalidSchedule, match="the name of a schedule is"):
        schedule(name, every(900))(tasks.noop)


def test_what_is_no_task_or_no_timing_is_refused() -> None:
    with pytest.raises(InvalidSchedule, match="is no task"):
        schedule("s", every(900))(tasks.plain)  # type: ignore[type-var]
    with pytest.raises(InvalidSchedule, match="has no timing"):
        schedule("s", 900)(tasks.noop)  # type: ignore[arg-type]


def test_one_name_is_for_one_task() -> None:
    schedule("s", every(900))(tasks.noop)
    schedule("s", every(800))(tasks.noop)
    with pytest.raises(InvalidSchedule, match=r"is declared for tests\.tasks\.noop and for"):
        schedule("s", every(900), args=[1])(tasks.echo)


def test_a_module_that_cannot_be_imported_retires_nothing_and_keeps_no_migration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule("s", every(900))(tasks.noop)
    schedules.sync()
    schedules._declared.clear()
    broken = tmp_path / "brokenapp"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "tasks.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with override_settings(INSTALLED_APPS=["relay_queue", "brokenapp"]):
        with pytest.raises(InvalidSchedule, match=r"brokenapp\.tasks cannot be imported"):
            schedules.sync()
        call_command("migrate", verbosity=0)
    sys.modules.pop("brokenapp", None)
    assert "Schedules are as they were: brokenapp.tasks" in caplog.text
    assert Schedule.objects.get().retired_at is None


def test_migrate_leaves_schedules_alone_where_the_command_is_to_sync_them(settings: Any) -> None:
    schedule("s", every(900))(tasks.noop)
    settings.RELAY = {"SYNC": "command", "PROJECT": "shop"}
    call_command("migrate", verbosity=0)
    assert not Schedule.objects.exists()
    call_command("relay", "schedules", "sync")
    assert Schedule.objects.get().source == "code:shop"


def test_a_function_is_told_the_slot_that_it_runs_for() -> None:
    tasks.calls.clear()
    schedule("s", every(900))(tasks.tell_slot)
    now = datetime(2026, 5, 1, 12, 7, tzinfo=UTC)
    with clock.use(lambda: now):
        schedules.sync()
    later = now + timedelta(minutes=10)
    with clock.use(lambda: later):
        assert store.in_transaction(store.fire_schedules) == 1
        assert run_pending() == 1
        assert tasks.calls == [datetime(2026, 5, 1, 12, 15, tzinfo=UTC)]
        tasks.calls.clear()
        tasks.tell_slot.enqueue()
        run_pending()
    assert tasks.calls == [None]


def test_schedules_are_paused_resumed_and_run_by_name() -> None:
    schedule("s", every(900))(tasks.noop)
    schedules.sync()
    first, second = schedules.next_runs("s", 2)
    assert second - first == timedelta(minutes=15)
    assert schedules.pause("s") is True
    assert schedules.next_runs("s") == []
    assert schedules.resume("s") is True
    assert schedules.next_runs("s", 1) == [first]
    job_id = schedules.run("s")
    assert ScheduleRun.objects.get().job_id == Job.objects.get().pk == job_id
    with pytest.raises(InvalidSchedule, match="no schedule 'other'"):
        schedules.next_runs("other")
