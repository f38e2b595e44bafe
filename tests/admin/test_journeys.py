"""What an operator comes to the console for, from the first look to the end, with real workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from playwright.sync_api import expect

from relay_queue import clock
from relay_queue.admin.dashboard import page as dashboard
from relay_queue.models import Worker
from relay_queue.query.verify import verify
from relay_queue.testing import run_pending
from tests import tasks
from tests.admin.acting import person
from tests.admin.conftest import Visit
from tests.conftest import wait_until
from tests.process import chores
from tests.process import settings as process_settings
from tests.process.farm import Farm, stopped

CONSOLE = "/admin/relay_queue/"
DENIED = 403

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def farm(transactional_db: None, settings: Any, tmp_path: Path) -> Iterator[Farm]:
    """Return what starts workers on the test database; at the end the ledger holds."""
    settings.TASKS = process_settings.TASKS
    farm = Farm(Path(connection.settings_dict["NAME"]), tmp_path)
    yield farm
    farm.close()
    found = verify(None)
    assert not found.faults, found.faults


@pytest.fixture
def page(visit: Visit, admin_user: User, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a page of an administrator, whose dashboard is refreshed four times a second."""
    monkeypatch.setattr(dashboard, "REFRESH_SECONDS", 0.25)
    client = Client()
    client.force_login(admin_user)
    return visit(client)


def job_page(job_id: int) -> str:
    return f"{CONSOLE}job/{job_id}/change/"


def tile(page: Any, key: str) -> Any:
    return page.locator(f".relay-tile--{key} .relay-value")


def live_worker(page: Any, pid: int) -> Any:
    """Return the row of a process among the workers that are alive."""
    table = page.get_by_role("region", name="Workers", exact=True)
    return table.get_by_role("row").filter(has_text=f"pid {pid}")


def rows(page: Any) -> Any:
    return page.locator("#result_list tbody tr")


def see(page: Any, address: str, state: str) -> None:
    """Look at the page of a job, again and again, until it is in this state."""

    def is_seen() -> bool:
        page.goto(address)
        return bool(page.locator(".relay-job__badges").get_by_text(state, exact=True).count())

    wait_until(is_seen, message=lambda: page.locator("#content-main").inner_text(), interval=0.2)


def last_night(days_ago: int = 1) -> datetime:
    """Return half past eleven of the evening before today, or of an earlier one."""
    today = clock.now().replace(hour=23, minute=30, second=0, microsecond=0)
    return today - timedelta(days=days_ago)


def test_depth_falls_before_the_eyes_of_who_watches_a_worker(page: Any, farm: Farm) -> None:
    steps = ["first", "second", "third"]
    for step in steps:
        farm.enqueue(chores.wait, farm.file(step))
    page.goto(f"{CONSOLE}dashboard/")
    expect(tile(page, "ready")).to_have_text("3")
    alarm = page.get_by_text("No worker is alive, and 3 jobs are ready.")
    expect(alarm).to_be_visible()
    farm.work(concurrency=1)
    expect(alarm).to_have_count(0)
    for left, step in zip((2, 1, 0), steps, strict=True):
        expect(tile(page, "ready")).to_have_text(str(left))
        expect(tile(page, "running")).to_have_text("1")
        farm.make(step)
    expect(tile(page, "running")).to_have_text("0")
    expect(live_worker(page, farm.worker()).get_by_role("cell").nth(3)).to_have_text("3")


def test_dead_letters_of_last_night_are_found_read_and_retried(
    page: Any, farm: Farm, tmp_path: Path
) -> None:
    missing = tmp_path / "orders.csv"

    def die(task: Any, *arguments: str, days_ago: int = 1) -> int:
        night = last_night(days_ago)
        with clock.use(lambda: night):
            job_id = int(task.enqueue(*arguments).id)
        assert run_pending(at=night) == 1
        return job_id

    wanted = [die(tasks.read_file, str(missing)) for _ in range(3)]
    others = [die(tasks.read_file, str(missing), days_ago=2), die(tasks.fatal)]

    page.goto(f"{CONSOLE}dashboard/")
    page.get_by_role("link", name="Dead letters").first.click()
    expect(rows(page)).to_have_count(len(wanted) + len(others))
    page.locator("summary", has_text="Task").click()
    page.get_by_role("link", name="tests.tasks.read_file").click()
    page.locator("summary", has_text="Finished").click()
    page.get_by_label("finished: from, day").fill(f"{last_night():%Y-%m-%d}")
    page.get_by_label("finished: from, time").fill("20:00")
    page.get_by_label("finished: until, day").fill(f"{last_night() + timedelta(days=1):%Y-%m-%d}")
    page.get_by_label("finished: until, time").fill("06:00")
    page.get_by_role("button", name="Apply").filter(visible=True).click()
    expect(rows(page)).to_have_count(len(wanted))
    found = page.url

    page.get_by_role("link", name=str(wanted[0]), exact=True).click()
    page.get_by_text("Traceback", exact=True).click()
    traceback = page.locator(".relay-timeline pre")
    expect(traceback).to_contain_text("in read_file")
    expect(traceback).to_contain_text(
        f"FileNotFoundError: [Errno 2] No such file or directory: '{missing}'"
    )

    missing.write_text("1;2;3")
    farm.work()
    page.goto(found)
    page.locator("#action-toggle").check()
    page.locator("select[name=action]").select_option(label="Retry with fresh attempts")
    page.locator("button[name=index]").click()
    expect(page.get_by_text("Retry with fresh attempts: done for 3 jobs.")).to_be_visible()
    for job_id in wanted:
        see(page, job_page(job_id), "Succeeded")
    page.goto(f"{CONSOLE}deadletter/")
    expect(rows(page)).to_have_count(len(others))


def test_paused_queue_keeps_its_jobs_until_it_is_resumed(page: Any, farm: Farm) -> None:
    farm.work()
    farm.wait_state(farm.enqueue(chores.note, queue_name="mail"), "succeeded")
    page.goto(f"{CONSOLE}queue/mail/change/")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("Pause: done for 1 queue.")).to_be_visible()
    held = farm.enqueue(chores.note, queue_name="mail")
    # Of two that were enqueued one after the other, the later one runs.
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    see(page, job_page(held), "Ready")
    page.goto(f"{CONSOLE}dashboard/")
    page.get_by_role("link", name="Queue mail is paused").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("Resume: done for 1 queue.")).to_be_visible()
    see(page, job_page(held), "Succeeded")


def test_killed_worker_disappears_and_its_job_moves(page: Any, farm: Farm) -> None:
    farm.work(concurrency=1)
    killed = farm.worker()
    job = farm.enqueue(chores.wait, farm.file("go"))
    farm.wait_runs(job)
    page.goto(f"{CONSOLE}dashboard/")
    expect(live_worker(page, killed)).to_contain_text("1 of 1")
    os.kill(killed, signal.SIGKILL)
    expect(live_worker(page, killed)).to_have_count(0)
    (heir,) = wait_until(lambda: [run.pid for run in farm.runs(job) if run.pid != killed])
    expect(live_worker(page, heir)).to_contain_text("1 of 1")
    page.get_by_text("1 stopped in the last day").click()
    expect(page.get_by_role("region", name="Stopped workers")).to_contain_text(f"pid {killed}")
    page.goto(job_page(job))
    second, first = page.locator(".relay-timeline__entry").all()
    expect(first).to_contain_text("Lost")
    expect(first).to_contain_text(f"pid {killed}")
    expect(second).to_contain_text(f"pid {heir}")
    farm.make("go")
    see(page, job_page(job), "Succeeded")


def test_refused_late_ack_stands_on_the_timeline_of_its_job(page: Any, farm: Farm) -> None:
    farm.work(lease=1)
    old = farm.worker()
    job = farm.enqueue(chores.wait_first_time, farm.file("go"))
    farm.wait_runs(job)
    farm.work()
    with stopped(old):
        farm.wait_state(job, "succeeded")
    page.goto(f"{CONSOLE}dashboard/")
    expect(tile(page, "refused")).to_have_text("0")
    farm.make("go")
    expect(tile(page, "refused")).to_have_text("1")
    tile(page, "refused").get_by_role("link").click()
    expect(rows(page)).to_have_count(1)
    page.goto(job_page(job))
    second, first = page.locator(".relay-timeline__entry").all()
    late = "Its owner came back late and was refused:"
    expect(first).to_contain_text("Expired")
    expect(first.get_by_text(late)).to_be_visible()
    expect(first.locator(".relay-timeline__refused")).to_contain_text("ack")
    expect(second.get_by_text(late)).to_have_count(0)
    expect(page.locator(".relay-job__badges")).to_contain_text("Succeeded")


def test_running_job_is_cancelled_and_its_function_told(page: Any, farm: Farm) -> None:
    farm.work(concurrency=1)
    job = farm.enqueue(chores.heed)
    farm.wait_runs(job)
    page.goto(job_page(job))
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("heading", name="Cancel: 1 job")).to_be_visible()
    page.get_by_role("button", name="Yes, I’m sure").click()
    expect(page.get_by_text("Cancel: done for 1 job.")).to_be_visible()
    expect(page.locator(".relay-job__badges")).to_contain_text("Cancelled")
    # The only slot is free again: the function has obeyed.
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
    assert Worker.objects.count() == 1


def test_visitor_without_permission_is_denied(visit: Visit, farm: Farm) -> None:
    job = farm.enqueue(chores.note)
    page = visit(person(), expected=(DENIED,))
    assert page.goto(f"{CONSOLE}dashboard/").status == DENIED
    page.goto(CONSOLE)
    expect(page.get_by_role("link", name="Jobs", exact=True).first).to_be_visible()
    expect(page.get_by_role("link", name="Dashboard", exact=True)).to_have_count(0)
    page.goto(job_page(job))
    expect(page.locator(".relay-job__badges")).to_contain_text("Ready")
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    expect(page.locator("#content-main")).not_to_contain_text(farm.effects)
    page.goto(f"{CONSOLE}job/")
    expect(page.locator("select[name=action]")).to_have_count(0)
    assert farm.job(job).state == "ready"
