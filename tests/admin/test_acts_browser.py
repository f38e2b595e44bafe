"""The acts in a real browser: what a person presses, and the progress that moves by itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client

from relay_queue.admin.acts import bulk, jobs
from relay_queue.models import BulkAct
from tests.admin.acting import person
from tests.store import actions

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

CHROMIUM = shutil.which("chromium")
SMALL = 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def client() -> Client:
    """Return the session of an operator who may cancel."""
    return person("cancel_job", "discard_job")


@pytest.fixture
def page(live_server: Any, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a page of a browser with that session; any complaint fails the test."""
    # Playwright runs a loop in this thread, in which Django would forbid to use the database.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    for module in (jobs, bulk):
        monkeypatch.setattr(module, "BATCH", SMALL)
    complaints: list[str] = []

    def judge(response: Any) -> None:
        if response.status >= 400 and "favicon" not in response.url:
            complaints.append(f"{response.status} {response.url}")

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(base_url=live_server.url)
        cookie = client.cookies["sessionid"].value
        context.add_cookies([{"name": "sessionid", "value": cookie, "url": live_server.url}])
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("response", judge)
        yield page
        browser.close()
    assert not complaints


def test_running_job_is_cancelled_with_two_presses(page: Any) -> None:
    job_id = actions.enqueue()
    actions.claim_one()
    page.goto(f"/admin/relay_queue/job/{job_id}/change/")
    expect(page.get_by_role("button", name="Discard")).to_be_disabled()
    page.get_by_text("Why some of these cannot be used now").click()
    expect(page.get_by_text("Only for jobs that are dead.")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Yes, I’m sure").click()
    expect(page.get_by_text("Cancel: done for 1 job.")).to_be_visible()
    assert actions.state(job_id) == "cancelled"


def test_progress_moves_by_itself_and_ends(page: Any) -> None:
    per_page = 50
    actions.enqueue_each(per_page + 2 * SMALL, queue="mail")
    page.goto("/admin/relay_queue/job/?queue=mail")
    page.locator("#action-toggle").check()
    page.get_by_role("button", name="Select all 56 jobs").click()
    page.locator("select[name=action]").select_option("cancel")
    page.locator("button[name=index]").first.click()
    expect(page.get_by_role("heading", name="Cancel: 56 jobs")).to_be_visible()
    page.get_by_role("button", name="Yes, I’m sure").click()
    expect(page.get_by_text("Waits for a worker")).to_be_visible()
    run = bulk._Run(BulkAct.objects.get())
    run.next_batch()
    expect(page.get_by_role("progressbar")).to_have_attribute("value", str(SMALL))
    expect(page.get_by_role("button", name="End it here")).to_be_visible()
    while run.next_batch():
        pass
    expect(page.get_by_text("Done.", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="End it here")).to_have_count(0)
