"""A project's own admin site: what it hides from somebody is hidden on every page, and from workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from relay_queue.admin import sight
from relay_queue.admin.actions import bulk, jobs, matching
from relay_queue.models import BulkAct, Job, Queue
from relay_queue.testing import run_pending
from tests.admin import tenants
from tests.admin.acting import person, said
from tests.admin.tenants import SITE
from tests.store import actions

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.admin.tenants")]


@pytest.fixture
def transactional_db(people_on_each_engine: None) -> None:
    """Stand in for the fixture of that name: real transactions, on each engine in turn."""


EVERYTHING = (
    *("view_dashboard", "view_payload", "view_bulkact", "cancel_job", "requeue_job"),
    *("discard_job", "pause_queue"),
)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (jobs, bulk):
        monkeypatch.setattr(module, "BATCH", 3)


@pytest.fixture
def mine() -> list[int]:
    """Enqueue jobs of the tenant who looks."""
    return actions.enqueue_each(5, queue="ann-mail")


@pytest.fixture
def others() -> list[int]:
    """Enqueue jobs of another tenant, in the same times."""
    return actions.enqueue_each(4, queue="bob-secret", task="bob.tasks.payroll")


@pytest.fixture
def ann(mine: list[int], others: list[int]) -> Client:
    return person(*EVERYTHING, name="ann")


def states(job_ids: list[int]) -> set[str]:
    return set(Job.objects.filter(pk__in=job_ids).values_list("state", flat=True))


def ask(client: Client, act: str = "cancel", query: str = "", page: str = "job/") -> Any:
    data = {"action": act, "select_across": "1", "_selected_action": "0", "index": "0"}
    return client.post(f"{SITE}{page}{query}", data)


def begin(client: Client, act: str = "cancel", query: str = "", page: str = "job/") -> BulkAct:
    question = ask(client, act, query, page)
    response = client.post(f"{SITE}{page}{query}", dict(question.context["hidden"]))
    assert response.status_code == 302, said(response)
    row = BulkAct.objects.latest("pk")
    assert response["Location"] == f"{SITE}bulkact/{row.pk}/change/", said(response)
    return row


def test_bulk_act_changes_only_what_the_site_of_the_operator_shows(
    ann: Client, mine: list[int], others: list[int]
) -> None:
    row = begin(ann)
    assert (row.site, row.matched) == ("tenants", 5)
    run_pending("default")
    row.refresh_from_db()
    assert (row.changed, row.skipped, row.stop_reason) == (5, 0, "")
    assert states(mine) == {"cancelled"}
    assert states(others) == {"ready"}


def test_question_about_everything_counts_what_the_site_shows(ann: Client) -> None:
    question = ask(ann)
    assert question.context["count"] == 5
    assert "bob" not in question.content.decode()


def test_few_at_once_are_those_of_the_site_too(ann: Client, others: list[int]) -> None:
    Job.objects.filter(queue="ann-mail").update(state="succeeded")
    question = ask(ann)
    assert question.context["count"] == 0
    ann.post(f"{SITE}job/", dict(question.context["hidden"]))
    assert states(others) == {"ready"}


@pytest.mark.parametrize("query", ["", "?queue=bob-secret", "?state__exact=ready", "?q=bob.tasks"])
def test_list_neither_shows_nor_counts_rows_that_the_site_hides(ann: Client, query: str) -> None:
    response = ann.get(f"{SITE}job/{query}")
    found = response.context["cl"]
    wanted = 0 if "bob" in query else 5
    assert (len(found.result_list), found.result_count) == (wanted, wanted)
    assert not found.page.total.more
    page = response.content.decode()
    assert "payroll" not in page
    assert "bob-secret" not in page.replace(query.partition("=")[2] or "-", "")


def test_counters_still_count_for_whom_nothing_is_hidden(ann: Client) -> None:
    User.objects.filter(username="ann").update(is_superuser=True)
    found = ann.get(f"{SITE}job/").context["cl"]
    assert found.result_count == 9
    assert not found.is_limited
    assert ann.get(f"{SITE}dashboard/").status_code == 200


def test_ids_of_hidden_jobs_lead_nowhere(ann: Client, others: list[int]) -> None:
    held = actions.claim_one("bob-secret")
    actions.nack(held, fatal=True)
    for path in (f"job/{held.job_id}/change/", f"job/{held.job_id}/history/"):
        assert ann.get(f"{SITE}{path}")["Location"] == "/tenants/"
    assert ann.get(f"{SITE}lease/{held.lease_id}/change/")["Location"] == "/tenants/"
    response = ann.post(f"{SITE}job/{held.job_id}/act/requeue/")
    assert "not there any more" in said(response)
    data = {"action": "requeue", "_selected_action": [held.job_id], "confirmed": "yes"}
    for page in ("job/", "deadletter/"):
        ann.post(f"{SITE}{page}", data)
    assert actions.state(held.job_id) == "dead"


@pytest.mark.parametrize("page", ["deadletter/", "lease/", "retry/"])
def test_other_lists_follow_the_page_of_jobs(ann: Client, page: str) -> None:
    for queue in ("bob-secret", "ann-mail"):
        actions.nack(actions.claim_one(queue), fatal=page != "retry/")
    response = ann.get(f"{SITE}{page}")
    found = response.context["cl"]
    assert (len(found.result_list), found.result_count) == (1, 1)
    assert "payroll" not in response.content.decode()
    assert "bob-secret" not in response.content.decode()


def test_bulk_act_from_the_dead_letters_follows_the_page_of_jobs(ann: Client) -> None:
    dead = []
    for queue in ("ann-mail", "bob-secret"):
        for _ in range(4):
            dead.append(actions.claim_one(queue))
            actions.nack(dead[-1], fatal=True)
    row = begin(ann, "requeue", page="deadletter/")
    run_pending("default")
    row.refresh_from_db()
    assert row.changed == 4, row.stop_reason
    assert [actions.state(held.job_id) for held in dead] == ["ready"] * 4 + ["dead"] * 4


def test_filters_offer_only_names_of_jobs_that_are_shown(ann: Client) -> None:
    for page in ("job/", "lease/"):
        request = ann.get(f"{SITE}{page}").wsgi_request
        offered = sight.names(request, tenants.tenants)
        assert offered.queues == ["ann-mail"]
        assert "bob.tasks.payroll" not in offered.tasks


def test_queue_page_has_no_number_of_jobs_that_are_hidden(ann: Client) -> None:
    page = ann.get(f"{SITE}queue/bob-secret/change/").content.decode()
    assert "relay-depths" not in page
    assert "payroll" not in page
    assert "relay-lately" not in page
    listed = ann.get(f"{SITE}queue/").context["cl"]
    assert not {"unfinished", "ready", "running", "dead"} & set(listed.list_display)
    assert "relay-next" in ann.get(f"{SITE}queue/ann-mail/change/").content.decode()


def test_site_that_limits_queues_too_shows_those_it_leaves_whole(
    ann: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tenants.tenants.get_model_admin(Queue)
    every = type(page).get_queryset

    def own(self: Any, request: Any) -> Any:
        return every(self, request).filter(name__startswith=f"{request.user.username}-")

    monkeypatch.setattr(type(page), "get_queryset", own)
    assert [row.name for row in ann.get(f"{SITE}queue/").context["cl"].result_list] == ["ann-mail"]
    assert "relay-depths" in ann.get(f"{SITE}queue/ann-mail/change/").content.decode()
    assert ann.get(f"{SITE}queue/bob-secret/change/").status_code == 302
    ann.post(f"{SITE}queue/bob-secret/act/pause/")
    assert Queue.objects.get(pk="bob-secret").paused_at is None


def test_worker_page_shows_no_lease_of_a_hidden_job_and_counts_none(ann: Client) -> None:
    worker = actions.register(name="anna", queues=["ann-mail", "bob-secret"])
    for queue in ("bob-secret", "bob-secret", "ann-mail"):
        actions.claim(1, queue, worker_id=worker)
    actions.nack(actions.claim(1, "bob-secret", worker_id=worker)[0], fatal=True)
    page = ann.get(f"{SITE}worker/{worker}/change/").content.decode()
    assert "payroll" not in page
    assert "bob-secret" not in page
    assert "ann-mail" in page
    assert "1 of " in page
    assert "relay-totals" not in page
    listed = ann.get(f"{SITE}worker/").context["cl"]
    assert not {"ran_well", "ran_badly", "came_late"} & set(listed.list_display)


def test_related_jobs_are_those_that_the_site_shows(ann: Client, mine: list[int]) -> None:
    first = actions.enqueue(queue="ann-mail", idempotency_key="one")
    second = actions.enqueue(queue="bob-mail", idempotency_key="one")
    page = ann.get(f"{SITE}job/{first}/change/").content.decode()
    assert f"/job/{mine[0]}/change/" in page
    assert f"/job/{second}/change/" not in page


def test_dashboard_is_shown_to_nobody_who_sees_only_some_jobs(ann: Client) -> None:
    for path in ("dashboard/", "dashboard/live/"):
        assert ann.get(f"{SITE}{path}").status_code == 403
    assert "Dashboard" not in ann.get("/tenants/").content.decode()
    assert ann.get("/admin/relay_queue/dashboard/").status_code == 200, "that site hides nothing"


def test_bulk_acts_of_others_are_hidden_with_their_jobs(ann: Client) -> None:
    bob = person(*EVERYTHING, name="bob")
    actions.enqueue(queue="bob-secret")
    row = begin(bob)
    begin(ann)
    assert [each.username for each in ann.get(f"{SITE}bulkact/").context["cl"].result_list] == [
        "ann"
    ]
    for path in ("change", "progress"):
        assert ann.get(f"{SITE}bulkact/{row.pk}/{path}/").status_code in {302, 404}
    ann.post(f"{SITE}bulkact/{row.pk}/end/")
    row.refresh_from_db()
    assert row.finished_at is None
    assert bob.get(f"{SITE}bulkact/{row.pk}/progress/").status_code == 200


def test_permission_that_the_site_refuses_is_refused_on_every_way(
    ann: Client, mine: list[int]
) -> None:
    held = actions.claim_one("ann-mail")
    actions.nack(held, fatal=True)
    page = ann.get(f"{SITE}job/{held.job_id}/change/").content.decode()
    assert "act/requeue/" in page
    assert "act/discard/" not in page
    assert ann.post(f"{SITE}job/{held.job_id}/act/discard/", {"confirmed": "1"}).status_code == 403
    data = {"action": "discard", "_selected_action": [held.job_id], "confirmed": "yes"}
    ann.post(f"{SITE}job/", data)
    assert actions.state(held.job_id) == "dead"


@pytest.fixture
def row(ann: Client) -> BulkAct:
    """Begin a bulk act of which no batch is done."""
    return begin(ann)


def stopped(row: BulkAct) -> str:
    """Run what waits, and return why the act was stopped; it has changed nothing."""
    run_pending("default")
    row.refresh_from_db()
    assert row.finished_at is not None
    assert (row.changed, Job.objects.filter(state="cancelled").count()) == (0, 0)
    return row.stop_reason


@pytest.mark.parametrize("name", ["gone", "", "twins"])
def test_bulk_act_of_a_site_that_is_gone_is_stopped(row: BulkAct, name: str) -> None:
    BulkAct.objects.update(site=name)
    assert f"there is no admin site {name!r} any more" in stopped(row)


def test_bulk_act_of_a_list_that_the_site_has_no_more_is_stopped(
    row: BulkAct, registered: Any
) -> None:
    registered.unregister(Job)
    assert "no list 'relay_queue.job'" in stopped(row)


@pytest.fixture
def registered() -> Iterator[Any]:
    """Return the site, and register jobs again afterwards."""
    yield tenants.tenants
    if not tenants.tenants.is_registered(Job):
        tenants.tenants.register(Job, tenants.TenantJobs)


def limit(monkeypatch: pytest.MonkeyPatch, keep: Any) -> None:
    """Let the page of jobs at the site keep what a function of rows and request returns."""
    every = tenants.TenantJobs.get_queryset
    monkeypatch.setattr(
        tenants.TenantJobs,
        "get_queryset",
        lambda page, request: keep(every(page, request), request),
    )


def test_bulk_act_of_a_site_that_wants_a_real_request_is_stopped(
    row: BulkAct, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, lambda rows, request: rows.filter(queue=request.tenant))
    assert "cannot list jobs in a worker: AttributeError" in stopped(row)


@pytest.mark.parametrize(
    "keep",
    [
        lambda rows, request: rows.filter(queue__startswith=request.META["HTTP_HOST"][:0]),
        lambda rows, request: rows if not request.session else rows.filter(queue="ann-mail"),
        lambda rows, request: (
            rows.filter(queue="ann-mail") if hasattr(request, "session") else rows
        ),
    ],
)
def test_bulk_act_that_a_worker_would_do_to_other_jobs_is_not_begun(
    ann: Client, monkeypatch: pytest.MonkeyPatch, keep: Any
) -> None:
    limit(monkeypatch, keep)
    ann.defaults["HTTP_HOST"] = "localhost"
    question = ask(ann)
    response = ann.post(f"{SITE}job/", dict(question.context["hidden"]))
    assert "Nothing was changed: admin site 'tenants'" in said(response)
    assert not BulkAct.objects.exists()


@pytest.mark.parametrize("change", [{"is_staff": False}, {"is_active": False}])
def test_bulk_act_of_somebody_who_is_no_staff_any_more_is_stopped(
    row: BulkAct, change: dict[str, bool]
) -> None:
    User.objects.filter(username="ann").update(**change)
    assert stopped(row) == "ann may not do this any more"


@pytest.mark.parametrize("change", [{"is_staff": False}, {"is_active": False}, None])
def test_permissions_are_asked_at_each_batch(row: BulkAct, change: dict[str, bool] | None) -> None:
    run = bulk._Run(row)
    assert run.next_batch()
    if change is None:
        User.objects.get(username="ann").user_permissions.clear()
    else:
        User.objects.filter(username="ann").update(**change)
    with pytest.raises(matching.Stopped, match="may not do this any more"):
        run.next_batch()
    row.refresh_from_db()
    assert row.changed == 3


def test_jobs_that_the_site_shows_are_asked_at_each_batch(row: BulkAct) -> None:
    run = bulk._Run(row)
    assert run.next_batch()
    User.objects.filter(username="ann").update(username="ann-moved")
    assert not run.next_batch()
    row.refresh_from_db()
    assert row.changed == 3


def test_act_that_the_site_refuses_by_now_is_stopped(
    row: BulkAct, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tenants.TenantJobs, "has_cancel_job_permission", lambda page, request: False
    )
    assert stopped(row) == "ann may not do this any more"


def test_of_sites_that_share_a_name_the_one_with_addresses_is_meant() -> None:
    assert matching.site_named("tenants") is tenants.tenants
    assert matching.site_named("twin") is tenants.other_twin
    assert matching.site_named("nobody") is None


def test_bulk_act_of_one_of_two_sites_of_a_name_is_not_begun(
    ann: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants.other_twin, "name", "tenants")
    question = ask(ann)
    monkeypatch.setattr(matching, "_served", lambda name: tenants.other_twin)
    response = ann.post(f"{SITE}job/", dict(question.context["hidden"]))
    assert "another admin site has the name 'tenants', too" in said(response)
    assert not BulkAct.objects.exists()


def test_site_without_a_page_of_bulk_acts_begins_them_all_the_same(
    ann: Client, registered: Any
) -> None:
    page = registered.get_model_admin(BulkAct)
    registered.unregister(BulkAct)
    try:
        question = ask(ann)
        response = ann.post(f"{SITE}job/", dict(question.context["hidden"]))
    finally:
        registered.register(BulkAct, type(page))
    assert re.search(r"A worker does it: bulk act \d+", said(response))
    run_pending("default")
    assert BulkAct.objects.get().changed == 5


def test_worker_finds_a_site_of_which_it_has_imported_nothing() -> None:
    code = (
        "import django; django.setup()\n"
        "from django.conf import settings; settings.ROOT_URLCONF = 'tests.admin.tenants'\n"
        "from relay_queue.admin.actions import matching\n"
        "import sys; assert 'tests.admin.tenants' not in sys.modules\n"
        "from relay_queue.models import Job\n"
        "print(type(matching.site_named('tenants').get_model_admin(Job)).__name__)"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "TenantJobs"
