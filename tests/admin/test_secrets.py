"""What callers and functions wrote is shown to those who may view it, and found by nobody else."""

from __future__ import annotations

import html
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from relay_queue import store
from relay_queue.models import BulkAct, Job, Lease
from relay_queue.store import NewBulkAct
from tests.store import actions

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def transactional_db(people_on_each_engine: None) -> None:
    """Stand in for the fixture of that name: real transactions, on each engine in turn."""


SITE = "/admin/relay_queue/"
SECRET = "hunter2"
LEDGER = ("view_job", "view_lease", "view_worker", "view_queue")


def viewer(*codenames: str) -> Client:
    """Return the browser of somebody who has these permissions and no other."""
    user = User.objects.create_user(f"viewer {'-'.join(codenames)}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


def page(client: Client, path: str) -> str:
    response = client.get(SITE + path, follow=True)
    assert response.status_code == 200, response.status_code
    return html.unescape(response.content.decode())


@pytest.fixture
def job() -> Job:
    """Let a job fail with its argument in its key, its message and its traceback."""
    worker = actions.register(name="anna")
    new = actions.job(args=(SECRET,), idempotency_key=f"user-{SECRET}")
    actions.do(store.enqueue, new)
    (held,) = actions.claim(1, worker_id=worker)
    actions.nack(
        held,
        fatal=True,
        error="shop.errors.Refused",
        message=f"Refused: {SECRET} is no password",
        traceback=f"password = '{SECRET}'",
    )
    return Job.objects.get(pk=held.job_id)


def everywhere(job: Job) -> list[str]:
    """Return the pages on which something of a job stands."""
    lease = Lease.objects.get(job=job)
    return [
        *(f"job/{job.pk}/change/", "job/", "deadletter/", "retry/", f"job/?q=id:{job.pk}"),
        *("lease/", f"lease/{lease.pk}/change/", f"worker/{lease.worker_id}/change/"),
        *("queue/default/change/", f"job/{job.pk}/history/"),
    ]


def test_without_view_payload_no_page_shows_what_was_written(job: Job) -> None:
    client = viewer(*LEDGER, "view_bulkact", "view_dashboard")
    for path in [*everywhere(job), "dashboard/", "bulkact/"]:
        assert SECRET not in page(client, path), path
    assert "Refused" in page(client, f"job/{job.pk}/change/"), "the class is a name in the code"
    assert "Refused" in page(client, "deadletter/")


def test_with_view_payload_all_of_it_is_shown(job: Job) -> None:
    client = viewer(*LEDGER, "view_payload")
    shown = page(client, f"job/{job.pk}/change/")
    for text in (f'"{SECRET}"', f"user-{SECRET}", "no password", f"password = '{SECRET}'"):
        assert text in shown
    assert "no password" in page(client, "deadletter/")
    assert "no password" in page(client, "job/")
    assert SECRET in page(client, f"lease/{Lease.objects.get().pk}/change/")


@pytest.mark.parametrize("query", ["key:user-{}", "error:{}", " ERROR : {}", "error:", "key:"])
@pytest.mark.parametrize("where", ["job/", "deadletter/"])
def test_search_by_what_may_not_be_viewed_finds_nothing_and_says_why(
    job: Job, query: str, where: str
) -> None:
    query = query.format(SECRET)
    client = viewer(*LEDGER)
    response = client.get(SITE + where, {"q": query})
    assert response.context["cl"].result_count == 0
    assert "You may not search by" in response.content.decode()
    missing = client.get(SITE + where, {"q": query.replace(SECRET, "nothing")})
    assert "You may not search by" in missing.content.decode(), "a hit and a miss look alike"
    found = viewer(*LEDGER, "view_payload").get(SITE + where, {"q": query})
    assert found.context["cl"].result_count == (1 if SECRET in query else 0)


def test_search_that_was_refused_is_no_way_to_act_on_anything(job: Job) -> None:
    client = viewer(*LEDGER, "requeue_job")
    data = {"action": "requeue", "select_across": "1", "_selected_action": "0"}
    question = client.post(f"{SITE}job/?q=error:{SECRET}", data)
    assert question.context["count"] == 0


def test_filters_of_bulk_acts_tell_no_text_that_was_searched_for(job: Job) -> None:
    for kind in ("error", "key"):
        new = NewBulkAct(
            *(kind, "cancel", None, "relay_queue.job", f"q={kind}:{SECRET}&queue=default"),
            *("UTC", "en", 9, 1, "0", "ada", "admin"),
        )
        actions.do(store.start_bulk, new)
    client, other = viewer("view_bulkact"), viewer("view_bulkact", "view_payload")
    for path in ("bulkact/", *(f"bulkact/{row.pk}/change/" for row in BulkAct.objects.all())):
        assert SECRET not in page(client, path)
        assert "queue: default" in page(client, path)
        assert SECRET in page(other, path)


def test_bulk_act_of_a_search_that_is_not_allowed_any_more_is_stopped(job: Job) -> None:
    from relay_queue.admin.actions import catalogue, matching

    client = viewer(*LEDGER, "requeue_job")
    user = User.objects.get()
    new = NewBulkAct(
        *("n", "requeue", None, "relay_queue.job", f"q=error:{SECRET}", "UTC", "en", 9, 1),
        *(str(user.pk), "ada", "admin"),
    )
    act = catalogue.job_action("requeue")
    assert act is not None
    with pytest.raises(matching.Stopped, match="refuses the search"):
        matching.rows_of(new, act)
    assert client


def test_lists_show_what_the_ledger_tells_to_those_who_may_view_leases(job: Job) -> None:
    client = viewer("view_job")
    for path in ("job/", "deadletter/", "retry/"):
        found = client.get(SITE + path).context["cl"]
        assert not {"verdict", "last_attempt"} & set(found.list_display)
        assert "anna" not in page(client, path)
        assert "Refused" not in page(client, path)
    assert client.get(f"{SITE}job/?verdict=once").status_code == 400
    shown = page(client, f"job/{job.pk}/change/")
    for text in ("anna", "Ran once", "Refused", "Last attempt took"):
        assert text not in shown


def test_names_of_workers_are_shown_to_those_who_may_view_workers(job: Job) -> None:
    lease = Lease.objects.get()
    client, other = viewer("view_job", "view_lease"), viewer(*LEDGER)
    for path in (
        "job/",
        "deadletter/",
        "lease/",
        f"job/{job.pk}/change/",
        f"lease/{lease.pk}/change/",
    ):
        shown = page(client, path)
        assert "anna" not in shown, path
        assert f"#{lease.worker_id}" in shown, path
        assert "anna" in page(other, path), path
    assert client.get(f"{SITE}job/?verdict=once").context["cl"].result_count == 1


@pytest.mark.parametrize("kind", ["ERROR", "TRACEBACK", "ARGUMENTS"])
def test_formatter_of_the_project_words_what_is_shown(job: Job, settings: Any, kind: str) -> None:
    settings.RELAY = {"FORMATTER": "tests.admin.shown.shouted", "REDACT": ["password"]}
    shown = page(viewer(*LEDGER, "view_payload"), f"job/{job.pk}/change/")
    assert f"<{kind} OF TESTS.TASKS.ANYTHING" in shown
    assert SECRET not in shown.replace(f"user-{SECRET}", "")


@pytest.mark.parametrize(
    ("path", "raised"),
    [
        ("tests.admin.shown.fails", "ValueError"),
        ("tests.admin.shown.nothing", "TypeError"),
        ("tests.admin.shown.missing", "ImportError"),
        ("nowhere.at.all", "ModuleNotFoundError"),
    ],
)
def test_error_in_the_formatter_breaks_no_page_and_shows_nothing_that_was_written(
    job: Job, settings: Any, path: str, raised: str
) -> None:
    settings.RELAY = {"FORMATTER": path}
    client = viewer(*LEDGER, "view_payload")
    for where in everywhere(job):
        shown = page(client, where)
        assert SECRET not in shown.replace(f"user-{SECRET}", ""), where
    assert f"{path}, raised {raised})" in page(client, f"job/{job.pk}/change/")
    assert f"{path}, raised {raised})" in page(client, "deadletter/")


def test_formatter_shows_nothing_to_those_who_may_not_view_it(job: Job, settings: Any) -> None:
    settings.RELAY = {"FORMATTER": "tests.admin.shown.shouted"}
    client = viewer(*LEDGER)
    for path in everywhere(job):
        assert SECRET.upper() not in page(client, path)
