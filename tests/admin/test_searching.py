"""The search by errors: in any case of any script, and no more rows looked at than a page may."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from relay_queue.admin.lists import searching
from relay_queue.models import Job
from relay_queue.query import lists
from tests.store import actions

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/relay_queue/job/"


@pytest.fixture
def transactional_db(people_on_each_engine: None) -> None:
    """Stand in for the fixture of that name: real transactions, on each engine in turn."""


@pytest.fixture
def admin(transactional_db: None) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def failed(message: str) -> int:
    job_id = actions.enqueue()
    actions.nack(actions.claim_one(), fatal=True, message=message)
    return job_id


def found(client: Client, text: str) -> set[int]:
    rows = client.get(LIST, {"q": f"error:{text}"}).context["cl"].result_list
    return {row.pk for row in rows}


@pytest.mark.parametrize(
    "text",
    ["Größe", "İstanbul ışık", "Ошибка данных", "中文错误", "Café", "ÀÉÎ", "Timeout", "ﬁnanzamt"],
)
def test_error_is_found_in_any_case_of_any_script(admin: Client, text: str) -> None:
    job_id = failed(f"ValueError: {text} was there")
    failed("ValueError: nothing like it")
    for spelled in (text, text.upper(), text.upper()[1:-1]):
        assert found(admin, spelled) == {job_id}, spelled


@pytest.mark.parametrize("text", ["100%", "no_address", r"a\\b", "it's"])
def test_signs_that_mean_something_to_a_database_mean_themselves(admin: Client, text: str) -> None:
    job_id = failed(f"ValueError: {text}")
    failed("ValueError: 100 noxaddress ab its")
    assert found(admin, text) == {job_id}


def test_server_without_rules_of_unicode_still_searches(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "_has_icu", lambda alias, settings: False)
    job_id = failed("ValueError: Timeout")
    assert found(admin, "TIMEOUT") == {job_id}


def test_act_on_everything_that_matches_means_what_was_shown(admin: Client) -> None:
    job_id, other = failed("ValueError: Größe"), failed("ValueError: Länge")
    data = {"action": "requeue", "select_across": "1", "_selected_action": "0"}
    address = f"{LIST}?q=error:GRÖSSE"
    question = admin.post(address, data)
    admin.post(address, dict(question.context["hidden"]))
    states = dict(Job.objects.values_list("pk", "state"))
    assert states == {job_id: "ready", other: "dead"}


def test_page_looks_at_no_more_errors_than_its_bound(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "SCAN", 3)
    monkeypatch.setattr(lists, "COUNT_SCAN", 3)
    wanted = failed("ValueError: needle")
    for _ in range(4):
        failed("ValueError: hay")
    with CaptureQueriesContext(connection) as captured:
        listed = admin.get(LIST, {"q": "error:needle"}).context["cl"]
    assert listed.result_list == []
    assert listed.page.total == lists.Counted(0, more=True)
    assert listed.page.beyond is not None
    reads = [query["sql"] for query in captured if "last_error > ''" in query["sql"]]
    assert reads
    assert all("LIMIT 3)" in sql or "LIMIT 4)" in sql or "LIMIT 1 " in sql for sql in reads)
    onward = listed.pages()["beyond"]
    assert [row.pk for row in admin.get(f"{LIST}{onward}").context["cl"].result_list] == [wanted]
