"""One browser for the tests of a module, and pages that no complaint of it escapes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.test import Client

from relay_queue.query import status

Visit = Callable[..., Any]

CHROMIUM = shutil.which("chromium")
WITHOUT_CHROMIUM = (
    "The tests of the console drive Chromium, and there is no program `chromium` on the PATH."
    " Install it (on Debian: apt-get install chromium), or leave these tests out: -m 'not browser and not torture'."
)
PATIENCE_MILLISECONDS = 120_000
REFUSED = "the server responded with a status of"
"""Part of what Chromium prints for an answer of 400 and above; the answer itself is judged."""

AUDITOR = "axe.js"
"""The name under which axe runs: the styles that it tries out are not the page's doing."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return the browser. A machine without one fails: a console nobody opened is not tested."""
    if CHROMIUM is None:
        pytest.fail(WITHOUT_CHROMIUM)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MILLISECONDS)
    # Playwright runs a loop in this thread, in which Django would forbid to use the database.
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, live_server: Any) -> Iterator[Visit]:
    """Return what opens an empty page with the session of a test client.

    The test fails on errors and warnings in the browser's console, which has the breaches of the
    content security policy, on uncaught errors, and on answers of 400 and above that are not among
    the statuses that the test has said to expect.
    """
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_page(client: Client, *, expected: tuple[int, ...] = (), **options: Any) -> Any:
        context = browser.new_context(base_url=live_server.url, **options)
        contexts.append(context)
        cookie = client.cookies["sessionid"].value
        context.add_cookies([{"name": "sessionid", "value": cookie, "url": live_server.url}])
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        listen(page, complaints, expected)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def listen(page: Any, complaints: list[str], expected: tuple[int, ...]) -> None:
    """Note in ``complaints`` whatever the browser says against a page, but expected statuses."""

    def hear(message: Any) -> None:
        is_of_page = message.location["url"] != AUDITOR and REFUSED not in message.text
        if message.type in {"error", "warning"} and is_of_page:
            complaints.append(f"{page.url}: {message.type}: {message.text}")

    def judge(response: Any) -> None:
        if response.status >= 400 and response.status not in expected:
            complaints.append(f"{page.url}: {response.status} for {response.url}")

    page.on("console", hear)
    page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
    page.on("response", judge)


@pytest.fixture
def people_on_each_engine(each_engine: None) -> Iterator[None]:
    """Run a test on each engine, and remove its people afterwards, whom no emptying of Relay's takes."""
    from django.contrib.admin.models import LogEntry
    from django.contrib.auth.models import User
    from django.contrib.contenttypes.models import ContentType

    ContentType.objects.clear_cache()  # its ids are those of one database
    yield
    LogEntry.objects.all().delete()
    User.objects.all().delete()
    ContentType.objects.clear_cache()


@pytest.fixture(autouse=True)
def fresh_overviews(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the dashboard read anew; the tests of sharing turn that off again."""
    monkeypatch.setattr(status, "OVERVIEW_SECONDS", 0.0)
