"""The dashboard in a real browser: it follows the queue, and leaves the reader in peace."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from playwright.sync_api import expect

from relay_queue.admin.dashboard import page as dashboard
from tests.admin.conftest import Visit
from tests.store import actions

PATH = "/admin/relay_queue/dashboard/"
TOP = "element => element.getBoundingClientRect().top"
BROKEN = 500

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def page(visit: Visit, admin_user: User, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the dashboard of an administrator, refreshed four times a second."""
    monkeypatch.setattr(dashboard, "REFRESH_SECONDS", 0.25)
    client = Client()
    client.force_login(admin_user)
    page = visit(client, expected=(BROKEN,), viewport={"width": 900, "height": 500})
    page.goto(PATH)
    page.locator("#relay-live[data-state=live]").wait_for()
    return page


def ready(page: Any) -> Any:
    return page.locator(".relay-tile--ready .relay-value")


def wait_for(page: Any, n: int) -> None:
    """Wait until the tile of ready jobs shows a number."""
    expect(ready(page)).to_have_text(str(n))


def test_figures_follow_the_queue_and_leave_focus_scroll_and_tables(page: Any) -> None:
    actions.register()
    actions.enqueue_each(3)
    wait_for(page, 3)
    actions.ack(actions.claim_one())
    page.locator("[data-key=workers] .relay-scroll").wait_for()
    page.evaluate("scrollTo(0, 300)")
    name = page.locator("[data-key=queues] tbody tr[data-key=default] .relay-name a")
    name.focus()
    name.evaluate("element => { element.isTheSame = true; }")
    before = name.evaluate(TOP)
    actions.enqueue_each(4)
    # Nobody serves it, so a notice appears above as well.
    actions.enqueue(queue="zebra")
    wait_for(page, 7)
    assert page.evaluate("document.activeElement.isTheSame")
    assert abs(name.evaluate(TOP) - before) < 1


def test_opened_table_stays_open(page: Any) -> None:
    from relay_queue import clock, store

    minute = clock.now().replace(second=0, microsecond=0)
    actions.do(store.roll_up, 1, {("default", minute): store.Totals(succeeded=5)})
    page.locator("[data-key=hour] summary").click()
    actions.enqueue()
    wait_for(page, 1)
    table = page.locator("[data-key=hour] details table")
    expect(table).to_be_visible()


def test_pause_stops_the_refreshing_until_it_is_resumed(page: Any) -> None:
    page.get_by_role("button", name="Pause").click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    actions.enqueue()
    page.wait_for_timeout(1_000)
    assert asked == []
    expect(page.locator("#relay-status-text")).to_have_text("Paused")
    page.get_by_role("button", name="Resume").click()
    wait_for(page, 1)


def test_hidden_tab_asks_for_nothing(page: Any) -> None:
    page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    actions.enqueue()
    page.wait_for_timeout(1_000)
    assert asked == []
    page.evaluate(
        "() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }"
    )
    wait_for(page, 1)


def test_failing_server_is_named_and_asked_less_often(page: Any) -> None:
    actions.enqueue()
    wait_for(page, 1)
    asked: list[str] = []

    def fail(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(status=BROKEN, body="broken")

    page.route("**/live/", fail)
    page.locator("#relay-live[data-state=failed]").wait_for()
    expect(page.locator("#relay-status-text")).to_contain_text("Could not refresh")
    assert ready(page).inner_text() == "1", "what was known stays"
    page.wait_for_timeout(2_000)
    assert len(asked) < 6, "eight would be due"
    page.unroute("**/live/")
    actions.enqueue()
    wait_for(page, 2)
    page.locator("#relay-live[data-state=live]").wait_for()


def test_reader_who_was_signed_out_is_told(page: Any) -> None:
    page.context.clear_cookies()
    expect(page.locator("#relay-status-text")).to_contain_text("no longer signed in")
