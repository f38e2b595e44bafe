"""Addresses and forms that no page of the console makes: they show nothing, do nothing, break nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from relay_queue import clock
from relay_queue.admin import texts
from relay_queue.models import BulkAct, Job
from relay_queue.testing import run_pending
from tests.admin.acting import job_in, person
from tests.store import actions

pytestmark = pytest.mark.django_db

SITE = "/admin/relay_queue/"
HUGE = "9" * 25
LONG = "9" * 5_000
"""More digits than Python reads."""


@pytest.mark.parametrize(
    "condition",
    [
        "job/?payload__contains=s",
        "job/?result__isnull=0",
        "job/?pk__in=1",
        "job/?last_error__regex=(",
        "deadletter/?payload__startswith=s",
        "lease/?token__startswith=a",
        "lease/?traceback__contains=a",
        "lease/?job__payload__contains=s",
        "worker/?incarnation__startswith=a",
        "bulkact/?user_id=1",
    ],
)
def test_a_list_cannot_be_asked_for_what_its_pages_hide(admin_user: User, condition: str) -> None:
    job_in("running")
    client = Client()
    client.force_login(admin_user)
    assert client.get(SITE + condition).status_code == 400


@pytest.mark.parametrize(
    "address",
    [
        f"job/?queue=ready&state__exact=ready&p=3&at=2~{'9' * 19}~5",
        f"job/?queue=ready&state__exact=ready&p=3&at=2~-{'9' * 19}~5",
        "job/?queue=ready&p=3&at=2~9999-99-99 99:99:99~4",
        "job/?created_at__gte=0001-01-01T00:00:00%2B14:00",
        "job/?finished_at__lte=9999-12-31T23:59:59-14:00",
        "job/?created_at__range__gte_0=0001-01-01",
        "lease/?acquired_at__range__lte_0=9999-12-31",
        f"lease/?worker__id__exact={HUGE}",
        f"job/?p={LONG}",
        f"job/{HUGE}/change/",
        f"worker/{LONG}/change/",
        f"bulkact/{HUGE}/progress/",
    ],
)
@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_values_that_no_column_holds_are_no_error_of_ours(
    address: str, zone: str, settings: Any
) -> None:
    settings.TIME_ZONE = zone
    job_in("ready")
    response = person().get(SITE + address)
    assert response.status_code in {200, 302, 403, 404}


@pytest.mark.parametrize("key", ["abc", "1.5", HUGE, LONG, ""])
def test_ticked_keys_that_no_job_can_have_are_refused(key: str) -> None:
    job_id = job_in("ready")
    data = {"action": "cancel", "_selected_action": [str(job_id), key], "confirmed": "yes"}
    assert person("cancel_job").post(f"{SITE}job/", data).status_code == 400
    assert actions.state(job_id) == "ready"


def test_newest_id_of_any_length_is_read() -> None:
    job_id = job_in("ready")
    data = {"action": "cancel", "select_across": "1", "_selected_action": "0", "upper_id": LONG}
    response = person("cancel_job").post(f"{SITE}job/", data)
    assert response.status_code == 302
    assert actions.state(job_id) == "cancelled"


def _listed(client: Client, query: str) -> set[int]:
    return {job.pk for job in client.get(f"{SITE}job/?{query}").context["cl"].result_list}


def test_a_day_without_a_time_is_the_whole_day() -> None:
    job_id, client = job_in("ready"), person()
    today = f"{clock.now():%Y-%m-%d}"
    tomorrow = f"{clock.now() + timedelta(days=1):%Y-%m-%d}"
    field = "created_at__range__"
    assert _listed(client, f"{field}gte_0={today}&{field}gte_1=&{field}lte_0={today}") == {job_id}
    assert _listed(client, f"{field}lte_0={today}&{field}lte_1=") == {job_id}
    assert _listed(client, f"{field}gte_0={tomorrow}&{field}gte_1=") == set()


@pytest.mark.parametrize("typed", ["gte_0=someday", "gte_1=10:00", "lte_0=2026-01-01&lte_1=25:00"])
@pytest.mark.parametrize("more", ["", "&q=id:{job_id}", "&queue=dead"])
def test_a_range_that_is_none_holds_no_job_and_no_act_is_done_to_all(typed: str, more: str) -> None:
    job_id, client = job_in("dead"), person("discard_job")
    ranged = "&".join(f"created_at__range__{each}" for each in typed.split("&"))
    query = ranged + more.format(job_id=job_id)
    page = client.get(f"{SITE}job/?{query}")
    assert page.context["cl"].result_list == []
    assert b"errornote" in page.content
    data = {"action": "discard", "select_across": "1", "_selected_action": "0", "upper_id": job_id}
    client.post(f"{SITE}job/?{query}", data)
    assert Job.objects.filter(pk=job_id).exists()


def test_bulk_act_of_somebody_who_may_no_longer_look_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay_queue.admin.actions.jobs.BATCH", 1)
    client = person("cancel_job")
    job_ids = [job_in("scheduled"), job_in("scheduled")]
    data = {
        "action": "cancel",
        "select_across": "1",
        "_selected_action": "0",
        "upper_id": max(job_ids),
    }
    client.post(f"{SITE}job/?state__exact=scheduled", data)
    user = User.objects.get(username="operator")
    user.user_permissions.remove(user.user_permissions.get(codename="view_job"))
    run_pending()
    assert "may not view" in BulkAct.objects.get().stop_reason
    assert {actions.state(job_id) for job_id in job_ids} == {"scheduled"}


def _plain(first: Any, *secrets: Any, **options: Any) -> None: ...


class _Task:
    takes_context = False

    def __init__(self, func: Callable[..., None]) -> None:
        self.func = func


def test_redacted_rest_of_the_arguments_is_hidden_whatever_follows_it(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RELAY = {"REDACT": ["secrets"]}
    monkeypatch.setattr(f"{__name__}.task_with_rest", _Task(_plain), raising=False)
    payload = '{"args":["seen","one","two","three"],"kwargs":{}}'
    shown = texts.arguments(f"{__name__}.task_with_rest", payload)
    assert "seen" in shown
    assert not [secret for secret in ("one", "two", "three") if secret in shown]


def _shorter(first: Any) -> None: ...


def test_arguments_that_no_parameter_takes_any_more_are_hidden(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RELAY = {"REDACT": ["password"]}
    monkeypatch.setattr(f"{__name__}.task_made_shorter", _Task(_shorter), raising=False)
    shown = texts.arguments(
        f"{__name__}.task_made_shorter", '{"args":["seen","hunter2"],"kwargs":{}}'
    )
    assert "seen" in shown
    assert "hunter2" not in shown
