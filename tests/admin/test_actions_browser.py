"""The acts in a real browser: what a person presses, and the progress that moves by itself."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from relay_queue.admin.actions import bulk, jobs
from relay_queue.models import BulkAct
from tests.admin.acting import person
from tests.admin.conftest import Visit
from tests.store import actions

SMALL = 3

PRESS_TWICE = """() => {
    const held = [];
    // The last to hear of it. Nothing is sent in the end, so that the page stays to be looked at.
    window.addEventListener("submit", (event) => {
        held.push(event.defaultPrevented);
        event.preventDefault();
    });
    const sure = document.querySelector(".relay-act--sure");
    sure.click();
    sure.click();
    return held;
}"""
"""Press the button of a confirmation two times; tell for each press whether it was held back."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def page(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a page of an operator who may cancel and discard; batches are small."""
    for module in (jobs, bulk):
        monkeypatch.setattr(module, "BATCH", SMALL)
    return visit(person("cancel_job", "discard_job"))


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


def test_a_confirmation_that_is_pressed_twice_is_sent_once(page: Any) -> None:
    job_id = actions.enqueue()
    page.goto(f"/admin/relay_queue/job/{job_id}/change/")
    page.get_by_role("button", name="Cancel").click()
    sure = page.get_by_role("button", name="Yes, I’m sure")
    expect(sure).to_be_enabled()
    assert page.evaluate(PRESS_TWICE) == [False, True], "the first is sent, the second held back"
    expect(sure).to_be_disabled()


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
