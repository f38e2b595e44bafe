"""The dashboard shows how everything stands, to those who may see it, at a fixed cost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from html.parser import HTMLParser

import pytest
from django.contrib.admin import AdminSite
from django.contrib.auth.models import Permission, User
from django.db import DatabaseError, connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext

from relay_queue import clock, store
from relay_queue.admin import DashboardAdmin
from relay_queue.admin.dashboard import page as dashboard
from relay_queue.admin.dashboard import panels
from relay_queue.models import Dashboard
from relay_queue.query import status
from relay_queue.query.status import Overview
from relay_queue.states import State, WorkerOrder
from tests.store import actions

pytestmark = pytest.mark.django_db

PAGE = "/admin/relay_queue/dashboard/"
LIVE = f"{PAGE}live/"


class Shape(HTMLParser):
    """What a page is made of, as a browser sees it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "a":
            self.links.append(dict(attrs).get("href") or "")


@pytest.fixture
def admin(admin_user: User) -> Client:
    client = Client()
    client.force_login(admin_user)
    return client


@pytest.fixture
def viewer(db: None) -> Client:
    """Somebody who may see the dashboard and nothing else."""
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_dashboard"))
    client = Client()
    client.force_login(user)
    return client


def text(client: Client, path: str = LIVE) -> str:
    response = client.get(path)
    assert response.status_code == 200, response.status_code
    return response.content.decode()


def tile(page: str, key: str) -> str:
    """Return the words of one tile."""
    found = re.search(rf'data-key="{key}"><dt>(.*?)</dl>', page, re.DOTALL)
    assert found, f"no tile {key}"
    return " ".join(re.sub(r"<[^>]+>", " ", found[1]).split())


def one_in_each_state() -> None:
    """Leave jobs ready, running, retrying, scheduled, dead and succeeded."""
    worker = actions.register(name="anna")
    actions.enqueue_each(4)
    actions.ack(actions.claim_one(worker_id=worker))
    actions.nack(actions.claim_one(worker_id=worker), delay_seconds=600.0)
    actions.nack(actions.claim_one(worker_id=worker), fatal=True)
    actions.claim_one(worker_id=worker)
    actions.enqueue_each(2)
    actions.enqueue(run_after=clock.now() + timedelta(days=9))


# --- Who sees it ---------------------------------------------------------------


def test_dashboard_is_the_first_page_of_the_application(admin: Client) -> None:
    links = [link for link in Shape(text(admin, "/admin/")).links if "/relay_queue/" in link]
    assert links[:2] == ["/admin/relay_queue/", PAGE]


def test_staff_without_the_permission_are_denied() -> None:
    client = Client()
    client.force_login(User.objects.create_user("staff", is_staff=True))
    assert client.get(PAGE).status_code == 403
    assert client.get(LIVE).status_code == 403


def test_stranger_is_sent_to_the_login(client: Client) -> None:
    assert client.get(PAGE).status_code == 302
    assert client.get(LIVE).status_code == 302


def test_viewer_of_the_dashboard_alone_gets_numbers_without_links(viewer: Client) -> None:
    one_in_each_state()
    assert PAGE in text(viewer, "/admin/")
    page = text(viewer, PAGE)
    assert tile(page, "ready").startswith("Ready 2")
    assert Shape(text(viewer)).links == []


def test_dashboard_works_on_another_site(admin_user: User, rf: RequestFactory) -> None:
    site = AdminSite(name="backstage")
    request = rf.get("/backstage/")
    request.user = admin_user
    one_in_each_state()
    # Neither its addresses nor those of the lists are known: numbers without links.
    response = DashboardAdmin(Dashboard, site).live(request).render()
    assert tile(response.content.decode(), "dead").startswith("Dead letters 1")


# --- What it shows -------------------------------------------------------------


def test_figures_are_those_of_the_queues(admin: Client) -> None:
    one_in_each_state()
    page = text(admin)
    assert tile(page, "ready").startswith("Ready 2 oldest waits")
    assert tile(page, "running") == "Running 1 of 8 slots"
    assert tile(page, "retrying").startswith("Retrying 1 next ")
    assert tile(page, "scheduled").startswith("Scheduled 1 next in")
    assert tile(page, "dead").startswith("Dead letters 1")
    assert tile(page, "workers").startswith("Workers alive 1")


def test_done_and_failed_come_from_the_minutes(admin: Client) -> None:
    minute = clock.now().replace(second=0, microsecond=0)
    totals = store.Totals(succeeded=1_500, failed=500, retried=450, died=50)
    totals.run[store.bucket(0.01)] = 2_000
    actions.do(store.roll_up, 1, {("default", minute): totals})
    page = text(admin)
    assert tile(page, "throughput") == "Succeeded 1,500 in 1 h; 1,500 in 24 h"
    assert tile(page, "failures") == "Failure rate 25.0 % in 1 h; 25.0 % in 24 h"
    assert "1,500 succeeded, 500 attempts failed" in page
    assert "2,000 measured" in page


@pytest.mark.parametrize("state", ["ready", "running", "retrying", "scheduled", "dead"])
def test_number_leads_to_the_jobs_that_it_counts(admin: Client, state: str) -> None:
    one_in_each_state()
    numbers = re.findall(rf'<a href="([^"]*state[^"]*{state}[^"]*)">(\d+)</a>', text(admin))
    assert len(numbers) >= 2, "in a tile and in the table"
    for address, n in numbers:
        response = admin.get(address.replace("&amp;", "&"))
        assert response.status_code == 200, address
        assert response.context["cl"].result_count == int(n), address


def test_every_link_leads_somewhere(admin: Client) -> None:
    one_in_each_state()
    actions.enqueue(lease_seconds=1.0, queue="short")
    lease = actions.claim_one("short")
    actions.cancel(lease.job_id)
    actions.ack(lease)
    minute = clock.now().replace(second=0, microsecond=0)
    actions.do(store.roll_up, 1, {("default", minute): store.Totals(succeeded=1, failed=1)})
    links = set(Shape(text(admin)).links)
    assert any("refused" in link for link in links)
    for link in links:
        assert admin.get(link).status_code == 200, link


def test_new_project_is_told_how_to_begin(admin: Client) -> None:
    page = text(admin)
    assert "There is no queue yet" in page
    assert "python manage.py runworker" in page
    assert "No attempt has ended in this time" in page


def test_ready_jobs_without_a_worker_are_an_error(admin: Client) -> None:
    actions.enqueue_each(3)
    assert "No worker is alive, and 3 jobs are ready" in text(admin)


def test_queue_that_no_worker_serves_is_named(admin: Client) -> None:
    actions.register(queues=["mail"])
    actions.enqueue(queue="reports")
    actions.enqueue(queue="mail")
    page = text(admin)
    assert "Jobs are ready in queue reports, and no worker serves it." in page
    assert "in queue mail" not in page


def test_what_a_worker_leaves_out_is_shown_and_named_where_nobody_else_serves_it(
    admin: Client,
) -> None:
    worker = actions.register(queues=[], exclude_queues=["mail"])
    actions.enqueue(queue="mail")
    actions.enqueue(queue="reports")
    page = text(admin)
    assert "Jobs are ready in queue mail, and no worker serves it." in page
    assert "in queue reports" not in page
    assert "all but mail" in page
    own = admin.get(f"/admin/relay_queue/worker/{worker}/change/").content.decode()
    assert "all but <a" in own


def test_what_keeps_a_worker_from_its_work_is_named(admin: Client) -> None:
    worker = actions.register(name="anna")
    actions.do(store.heartbeat, worker, store.Totals(), "cannot claim jobs: no right")
    assert " cannot claim jobs: no right. No job is given up for that" in text(admin)
    actions.do(store.heartbeat, worker, store.Totals())
    assert "cannot claim" not in text(admin)


def test_paused_and_full_queues_are_named(admin: Client) -> None:
    actions.register()
    actions.enqueue(queue="paused")
    actions.do(store.pause, "paused")
    actions.enqueue(queue="full")
    actions.do(store.set_limits, "full", capacity=1, max_running=None)
    page = text(admin)
    assert "Queue paused is paused: nothing is claimed from it." in page
    assert "Queue full is full: enqueueing is refused until jobs finish." in page
    assert "1 of 1" in page


def test_unreadable_database_is_told_apart_from_an_empty_one(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise DatabaseError("disk I/O error")

    monkeypatch.setattr(status, "read_overview", fail)
    for path in (LIVE, PAGE):
        response = admin.get(path)
        assert response.status_code == 503
        assert "The queue cannot be read" in response.content.decode()
        assert "disk I/O error" in response.content.decode()


def test_hostile_names_are_shown_as_text(admin: Client) -> None:
    hostile = '"><img src=x onerror=alert(1)>'
    actions.register(name=hostile, host=hostile, queues=[hostile])
    actions.enqueue(queue=hostile)
    actions.do(store.pause, hostile)
    page = text(admin)
    elements = Shape(page).elements
    assert not [tag for tag, _ in elements if tag in {"img", "script"}]
    assert not [name for _, attrs in elements for name in attrs if name.startswith("on")]
    assert "onerror=alert(1)&gt;" in page


def test_chart_has_a_name_and_a_table_that_says_the_same(admin: Client) -> None:
    minute = clock.now().replace(second=0, microsecond=0)
    totals = store.Totals(succeeded=7)
    totals.wait[3] = totals.run[9] = 7
    actions.do(store.roll_up, 1, {("default", minute): totals})
    page = text(admin)
    pictures = [attrs for tag, attrs in Shape(page).elements if attrs.get("role") == "img"]
    assert len(pictures) == 4
    assert all(attrs["aria-label"] for attrs in pictures)
    assert page.count("As a table") == 4


# --- What it costs -------------------------------------------------------------


def test_number_of_queries_does_not_grow_with_the_data(admin: Client) -> None:
    text(admin)
    with CaptureQueriesContext(connection) as before:
        text(admin)
    for n in range(10):
        actions.register(name=f"worker-{n}")
        actions.enqueue(queue=f"q{n}")
        actions.claim_one(f"q{n}")
        actions.enqueue(queue=f"q{n}")
    with CaptureQueriesContext(connection) as after:
        text(admin)
    assert len(after) == len(before)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Overview]]:
    """The overviews that were read, while one serves for a minute."""
    found: list[Overview] = []
    read_overview = status.read_overview

    def note() -> Overview:
        found.append(read_overview())
        return found[-1]

    monkeypatch.setattr(status, "OVERVIEW_SECONDS", 60.0)
    monkeypatch.setattr(status, "read_overview", note)
    status._overviews.clear()
    yield found
    status._overviews.clear()


def test_one_overview_serves_all_who_look(
    read: list[Overview], admin: Client, viewer: Client
) -> None:
    actions.enqueue(queue="mail")
    first, second, other = text(admin), text(admin), text(viewer)
    assert len(read) == 1
    assert first == second
    assert "mail" in other
    assert "/admin/relay_queue/queue/mail/" in first
    assert "/admin/relay_queue/queue/" not in other, "links are by who looks"


def test_a_shared_overview_is_shown_to_nobody_who_may_not_see_it(
    read: list[Overview], admin: Client
) -> None:
    text(admin)
    stranger = Client()
    stranger.force_login(User.objects.create_user("stranger", is_staff=True))
    assert stranger.get(LIVE).status_code == 403
    assert Client().get(LIVE).status_code == 302


def test_the_whole_page_is_read_anew(read: list[Overview], admin: Client) -> None:
    text(admin)
    actions.enqueue(queue="just-now")
    assert "just-now" not in text(admin)
    assert "just-now" in text(admin, PAGE)


def test_an_overview_that_is_too_old_is_read_again(
    read: list[Overview], admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    text(admin)
    monkeypatch.setattr(status.time, "monotonic", lambda: float("inf"))
    text(admin)
    assert len(read) == 2


def test_an_overview_of_another_database_does_not_serve(
    read: list[Overview], admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    text(admin)
    monkeypatch.setitem(connection.settings_dict, "NAME", "another")
    text(admin)
    assert len(read) == 2


def test_hundreds_of_workers_make_a_bounded_page_and_those_in_trouble_are_on_it(
    admin: Client,
) -> None:
    for n in range(120):
        last = actions.register(name=f"w{n:03}")
    actions.do(store.order_workers, [last], WorkerOrder.QUIET)
    page = text(admin)
    rows = re.findall(r"w\d\d\d</a>", page)
    assert (len(rows), rows[0]) == (50, "w119</a>")
    assert "Those in trouble first; 70 more." in page
    assert '<a href="/admin/relay_queue/worker/">All workers</a>' in page


def test_thousands_of_queues_make_a_bounded_page_that_leads_to_the_search(
    admin: Client, viewer: Client
) -> None:
    with store.transaction() as tx:
        for n in range(3_000):
            store.pause(tx, f"queue-{n:04}")
    small = len(text(admin))
    actions.enqueue_each(3, queue="queue-2345")
    actions.enqueue(queue="queue-1234")
    page = text(admin)
    rows = re.findall(r'<tr data-key="(queue-\d+)">', page)
    assert len(rows) == panels.MOST_QUEUES
    assert {"queue-1234", "queue-2345"} <= set(rows), "those with jobs come first"
    assert rows == sorted(rows)
    assert "2,950 more" in page
    assert 'href="/admin/relay_queue/queue/"' in page
    notices = page.count('class="relay-notice relay-notice--')
    assert notices == dashboard.MOST_NOTICES + 1
    assert "2,981 notices more." in page, "each paused queue, and that no worker is alive"
    assert len(page) < 1.1 * small < 300_000
    assert "Search all queues" not in text(viewer)


def test_every_state_has_its_number() -> None:
    assert {*panels.LISTED, State.SUCCEEDED, State.CANCELLED} == set(State)
