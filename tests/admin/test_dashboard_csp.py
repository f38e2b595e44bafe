"""No page needs an exception from the policy: nothing inline, and the header says so everywhere."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any
from urllib.parse import urldefrag, urljoin

import django
import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings

from relay_project import csp
from tests.admin.test_dashboard import one_in_each_state

MOST_PAGES = 150


class Inline(HTMLParser):
    """What of a page a strict policy would block, and where the page leads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.blocked: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values: dict[str, Any] = dict(attrs)
        handlers = [name for name in values if name.startswith("on") or name == "style"]
        # A script with a type of its own is data.
        is_code = tag == "script" and values.get("type") in (None, "text/javascript", "module")
        if handlers or tag == "style" or (is_code and not values.get("src")):
            self.blocked.append(f"<{tag} {handlers or ''}>")
        address = values.get("href") or values.get("src") or ""
        if address.startswith(("javascript:", "data:")):
            self.blocked.append(f"<{tag} {address[:30]}>")
        if tag == "a":
            self.links.append(address)


@pytest.mark.django_db
def test_no_page_of_the_console_has_anything_inline(admin_user: User) -> None:
    client = Client()
    client.force_login(admin_user)
    one_in_each_state()
    start = "/admin/relay_queue/"
    waiting, seen, blocked = [start], {start}, {}
    while waiting and len(seen) < MOST_PAGES:
        address = waiting.pop(0)
        response = client.get(address)
        if response.status_code != 200 or "html" not in response["Content-Type"]:
            continue
        page = Inline(response.content.decode())
        if page.blocked:
            blocked[address] = page.blocked
        for link in page.links:
            found = urldefrag(urljoin(address, link)).url
            if found.startswith(start) and found not in seen:
                seen.add(found)
                waiting.append(found)
    assert len(seen) > 5
    assert not blocked


@override_settings(SECURE_CSP=csp.POLICY)
def test_policy_is_sent_and_allows_nothing_inline(rf: RequestFactory) -> None:
    answer = csp.content_security_policy(lambda request: HttpResponse())(rf.get("/"))
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'; ")
    assert "unsafe" not in policy


@override_settings(SECURE_CSP=csp.POLICY)
def test_header_that_a_view_has_set_stays(rf: RequestFactory) -> None:
    def view(request: Any) -> HttpResponse:
        return HttpResponse(headers={csp.HEADER: "default-src 'none'"})

    answer = csp.content_security_policy(view)(rf.get("/"))
    assert answer.headers[csp.HEADER] == "default-src 'none'"


@pytest.mark.skipif(django.VERSION < (6, 0), reason="Django 5.2 has no policy of its own")
@override_settings(SECURE_CSP=csp.POLICY)
def test_both_versions_of_django_send_the_same_policy(rf: RequestFactory) -> None:
    from django.middleware.csp import ContentSecurityPolicyMiddleware

    ours = csp.content_security_policy(lambda request: HttpResponse())(rf.get("/"))
    theirs = ContentSecurityPolicyMiddleware(lambda request: HttpResponse())(rf.get("/"))
    assert ours.headers[csp.HEADER] == theirs.headers[csp.HEADER]
