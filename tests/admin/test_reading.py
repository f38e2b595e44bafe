"""The pages of the admin over the tables: they show, they find, and they change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from relay_queue import store
from relay_queue.admin import reading
from relay_queue.models import Job, Lease
from tests import tasks
from tests.store import actions

pytestmark = pytest.mark.django_db

PAGES = ("job", "deadletter", "retry", "lease", "queue", "worker")


def claimed(task: str) -> Lease:
    """Run nothing, but leave one job failed with a traceback, and return its lease."""
    with store.transaction() as tx:
        (claim,) = store.claim(tx, worker_id=None, queues=["default"], limit=1)
        store.nack(
            tx, claim.lease_id, claim.token, error="builtins.ValueError", traceback=f"in {task}"
        )
    return Lease.objects.get(pk=claim.lease_id)


@pytest.fixture
def job() -> Job:
    return Job.objects.get(pk=int(tasks.echo.enqueue({"password": "hunter2", "name": "Ada"}).id))


@pytest.fixture
def admin(admin_user: User) -> Client:
    client = Client()
    client.force_login(admin_user)
    return client


def text(client: Client, path: str) -> str:
    response = client.get(f"/admin/relay_queue/{path}")
    assert response.status_code == 200, response.status_code
    return response.content.decode()


@pytest.mark.parametrize("page", PAGES)
def test_page_lists_its_rows(admin: Client, job: Job, page: str) -> None:
    claimed("echo")
    assert "changelist-form" in text(admin, f"{page}/")


@pytest.mark.parametrize("page", PAGES)
def test_nothing_can_be_added(admin: Client, page: str) -> None:
    assert admin.get(f"/admin/relay_queue/{page}/add/").status_code == 403


def test_job_can_be_neither_changed_nor_deleted(admin: Client, job: Job) -> None:
    assert admin.post(f"/admin/relay_queue/job/{job.pk}/change/", {}).status_code == 403
    assert admin.post(f"/admin/relay_queue/job/{job.pk}/delete/", {}).status_code == 403
    assert Job.objects.filter(pk=job.pk).exists()


def test_staff_see_a_page_and_its_parts_only_with_their_permissions(job: Job) -> None:
    user = User.objects.create_user("staff", is_staff=True)
    client = Client()
    client.force_login(user)
    assert client.get("/admin/relay_queue/job/").status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_job"))
    page = text(client, f"job/{job.pk}/change/")
    assert "tests.tasks.echo" in page
    assert "Ada" not in page
    # The ledger has a permission of its own, and so have the arguments.
    assert "relay-attempts" not in page
    user.user_permissions.add(Permission.objects.get(codename="view_lease"))
    assert "relay-attempts" in text(client, f"job/{job.pk}/change/")
    user.user_permissions.add(Permission.objects.get(codename="view_payload"))
    assert "Ada" in text(client, f"job/{job.pk}/change/")


def test_job_page_shows_the_ledger(admin: Client, job: Job) -> None:
    lease = claimed("echo")
    page = text(admin, f"job/{job.pk}/change/")
    assert f"<dd>{lease.pk}</dd>" in page
    assert "builtins.ValueError" in page
    assert "in echo" in page


def test_token_is_never_shown_whole(admin: Client, job: Job) -> None:
    lease = claimed("echo")
    for path in ("lease/", f"lease/{lease.pk}/change/", f"job/{job.pk}/change/"):
        assert lease.token not in text(admin, path)
    assert f"{lease.token[:8]}…" in text(admin, f"lease/{lease.pk}/change/")
    assert "in echo" in text(admin, f"lease/{lease.pk}/change/")


def test_redacted_arguments_are_hidden(admin: Client, job: Job, settings: Any) -> None:
    settings.RELAY = {"REDACT": ["password"]}
    page = text(admin, f"job/{job.pk}/change/")
    assert "hunter2" not in page
    assert "Ada" in page


@pytest.mark.parametrize(
    ("term", "found"),
    [
        ("{id}", True),
        ("tests.tasks.ec", True),
        ("queue:default", True),
        ("queue:mail", False),
        ("task:tests.", True),
        ("key:none", False),
        ("error:boom", False),
        ("987654", False),
        ("9" * 40, False),
    ],
)
def test_search_finds_jobs_by_id_task_and_queue(
    admin: Client, job: Job, term: str, found: bool
) -> None:
    page = text(admin, f"job/?q={term.format(id=job.pk)}")
    assert (f"/job/{job.pk}/change/" in page) is found


def test_filters_keep_what_they_name(admin: Client, job: Job) -> None:
    link = f"/job/{job.pk}/change/"
    assert link in text(admin, "job/?state__exact=ready&queue=default")
    assert link not in text(admin, "job/?state__exact=dead")
    day = "created_at__range__{}_0=2020-01-01&created_at__range__{}_1=00:00:00"
    assert link in text(admin, "job/?" + day.format("gte", "gte"))
    assert link not in text(admin, "job/?" + day.format("lte", "lte"))
    lease = claimed("echo")
    row = f"/lease/{lease.pk}/change/"
    assert row in text(admin, "lease/?ended=yes&refused=no")
    assert row not in text(admin, "lease/?ended=no")


def test_list_counts_no_further_than_it_reaches(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_LISTED", 3)
    for n in range(5):
        actions.register(name=f"worker-{n}")
    response = admin.get("/admin/relay_queue/worker/")
    assert response.context["cl"].result_count == 3


def test_queue_page_shows_the_counters(admin: Client, job: Job) -> None:
    response = admin.get("/admin/relay_queue/queue/")
    (queue,) = [row for row in response.context["cl"].result_list if row.name == "default"]
    assert (queue.n_ready, queue.n_unfinished, queue.n_dead) == (1, 1, 0)
