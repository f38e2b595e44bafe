"""What the pages of the browser tests complain about reaches the test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.admin.conftest import listen

PROVOCATIONS = {
    "an error in the console": "console.error('spilt milk')",
    "an uncaught error": "setTimeout(() => { throw new Error('spilt milk'); })",
    "a style in the page": "document.body.append("
    "Object.assign(document.createElement('style'), {textContent: 'b {top: 0}'}))",
    "a script in the page": "document.body.append("
    "Object.assign(document.createElement('script'), {textContent: 'let milk'}))",
    "a missing file": "fetch('/static/milk')",
}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.django_db(transaction=True),
]


@pytest.mark.parametrize("what", PROVOCATIONS)
def test_complaint_is_heard(browser: Any, live_server: Any, what: str) -> None:
    page = browser.new_page(base_url=live_server.url)
    complaints: list[str] = []
    listen(page, complaints, ())
    page.goto("/admin/login/")
    assert not complaints
    with page.expect_event("pageerror" if "uncaught" in what else "console"):
        page.evaluate(f"() => {{ {PROVOCATIONS[what]} }}")
    page.close()
    assert len(complaints) == 1
