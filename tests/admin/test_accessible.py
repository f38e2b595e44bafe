"""Whoever cannot see the console well, or not at all, can use it: axe finds nothing serious."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.contrib.auth.models import User
from django.test import Client

from relay_queue import store
from relay_queue.models import Job, Lease
from relay_queue.testing import run_pending
from tests import tasks
from tests.admin.conftest import AUDITOR, Visit
from tests.admin.test_dashboard import one_in_each_state
from tests.store import actions

CONSOLE = "/admin/relay_queue/"
LISTS = ("job", "deadletter", "retry", "lease", "queue", "worker", "bulkact")
GRAVE = {"serious", "critical"}

ALL: dict[str, Any] = {"resultTypes": ["violations"]}
# Colours are all that a theme changes, so the second one is judged by them alone.
COLOURS = ALL | {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
THEMES = {"light": ALL, "dark": COLOURS}

UNFOLD = """
document.querySelectorAll("main details").forEach(one => {
    one.removeAttribute("name");
    one.open = true;
})
"""

# Links fade into their new colour; what is judged is the end of that.
SETTLE = """
document.getAnimations()
    .filter(one => one instanceof CSSTransition)
    .forEach(one => one.finish())
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def page(visit: Visit, admin_user: User) -> Any:
    """Return a page of an administrator."""
    client = Client()
    client.force_login(admin_user)
    return visit(client)


@pytest.fixture
def busy() -> None:
    """Leave jobs in every state, with a traceback, a late return and a paused queue."""
    one_in_each_state()
    tasks.fail_once_only.using(queue_name="mail").enqueue()
    run_pending("mail")
    actions.do(store.pause, "mail")
    held = actions.claim_one(worker_id=actions.register(name="berta"))
    actions.cancel(held.job_id)
    actions.ack(held)


def addresses() -> Iterator[str]:
    """Yield the pages that a link leads to."""
    yield "dashboard/"
    yield from (f"{name}/" for name in LISTS)
    yield f"job/{Job.objects.get(queue='mail').pk}/change/"
    yield f"job/{Lease.objects.get(refused_at__isnull=False).job_id}/change/"
    yield f"lease/{Lease.objects.latest('id').pk}/change/"
    yield f"worker/{Lease.objects.exclude(worker=None).latest('id').worker_id}/change/"
    yield "queue/mail/change/"
    yield "queue/mail/limits/"


def violations(page: Any) -> list[str]:
    """Unfold what can be unfolded and return what axe finds in light and dark, one line each."""
    page.evaluate(UNFOLD)
    page.evaluate(f"{Axe().axe_script}\n//# sourceURL={AUDITOR}")
    found = []
    for theme, options in THEMES.items():
        page.emulate_media(color_scheme=theme)
        page.evaluate(SETTLE)
        answer = page.evaluate("options => axe.run(options)", options)
        found += [
            f"{page.url} ({theme}): {rule['id']}: {node['target'][0]}: {node['failureSummary']}"
            for rule in answer["violations"]
            if rule["impact"] in GRAVE
            for node in rule["nodes"]
        ]
    return found


def test_axe_finds_nothing_grave_on_any_page(page: Any, busy: None) -> None:
    found = []
    for address in addresses():
        page.goto(CONSOLE + address)
        found += violations(page)
    assert not found, "\n".join(found)


WIDER = """
[...document.querySelectorAll("#content *, .breadcrumbs")].filter(one => {
    if (one.getBoundingClientRect().right <= document.documentElement.clientWidth + 1) return false;
    for (let up = one.parentElement; up; up = up.parentElement)
        if (getComputedStyle(up).overflowX !== "visible") return false;
    return true;
}).map(one => `${one.tagName}.${one.className}`)
"""
"""What sticks out of the page, and out of no part of it that scrolls by itself."""


def test_names_of_any_length_widen_no_page_of_a_phone(page: Any) -> None:
    name = "n" * 100
    worker_id = actions.register(name=name, host="h" * 200, queues=[name])
    actions.enqueue_each(3, queue=name, task=f"a.{name}", idempotency_key=None)
    held = actions.claim_one(name, worker_id=worker_id)
    actions.nack(held, fatal=True, error="e" * 200, message="m" * 400)
    actions.claim_one(name, worker_id=worker_id)
    page.set_viewport_size({"width": 390, "height": 800})
    wide = {}
    for address in (
        "dashboard/",
        f"job/?queue={name}",
        f"job/{held.job_id}/change/",
        "lease/",
        f"queue/{name}/change/",
        f"queue/{name}/limits/",
        "worker/",
        f"worker/{worker_id}/change/",
        f"worker/{worker_id}/history/",
    ):
        page.goto(CONSOLE + address)
        page.evaluate(UNFOLD)
        wide[address] = page.evaluate(WIDER)
    assert {address: found for address, found in wide.items() if found} == {}


def test_axe_finds_nothing_grave_where_an_act_is_confirmed(page: Any, busy: None) -> None:
    page.goto(f"{CONSOLE}job/{Job.objects.get(state='running').pk}/change/")
    page.get_by_role("button", name="Release lease").click()
    page.get_by_role("heading", name="Release lease: 1 job").wait_for()
    found = violations(page)
    page.goto(f"{CONSOLE}job/?state__exact=ready")
    page.locator("#action-toggle").check()
    page.locator("select[name=action]").select_option(label="Change priority")
    page.locator("button[name=index]").click()
    page.get_by_label("New priority").wait_for()
    found += violations(page)
    assert not found, "\n".join(found)
