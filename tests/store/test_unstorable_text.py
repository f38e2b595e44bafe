"""Text that a database cannot hold, a NUL or a lone surrogate, is refused or finds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command
from django.test import Client

from relay_queue import store
from relay_queue.exceptions import InvalidJob
from tests.store.actions import do, enqueue, job, nothing_written

pytestmark = pytest.mark.usefixtures("wall")

UNSTORABLE = ["a\x00b", "\x00", "a\ud800b", "\udcff"]
"""The last is how Python hands on a byte of the command line that is no UTF-8."""


@pytest.mark.parametrize("field", ["queue", "task", "idempotency_key", "backend"])
def test_job_with_such_a_name_is_refused_and_named(field: str) -> None:
    for text in UNSTORABLE:
        with nothing_written(), pytest.raises(InvalidJob, match=r"NUL|printed"):
            enqueue(**{field: text})


def test_queue_verbs_refuse_such_a_name() -> None:
    for text in UNSTORABLE:
        for verb in (store.pause, store.resume, store.hold_limits, store.ensure_queue):
            with nothing_written(), pytest.raises(InvalidJob, match="printed"):
                do(verb, text)
        with nothing_written(), pytest.raises(InvalidJob, match="printed"):
            store.rerank(text, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["cancel", "--yes", "--queue"],
        ["cancel", "--yes", "--task"],
        ["requeue", "--yes", "--queue"],
        ["pause"],
        ["limits"],
        ["rerank", "--aging-seconds", "60"],
        ["quiet"],
        ["stop-worker"],
        ["cancel"],
        ["inspect", "--job"],
    ],
    ids=" ".join,
)
def test_command_line_answers_with_one_sentence(arguments: list[str], capsys: Any) -> None:
    enqueue()
    for text in UNSTORABLE:
        with nothing_written(), pytest.raises((CommandError, SystemExit)) as raised:
            call_command("relay", *arguments, text)
        assert "Traceback" not in str(raised.value)
        said = str(raised.value)
        assert "\x00" not in said
        said.encode()


@pytest.fixture
def operator() -> Iterator[Client]:
    user = User.objects.create_superuser("operator")
    client = Client()
    client.force_login(user)
    yield client
    Session.objects.all().delete()
    user.delete()


def test_console_finds_nothing_and_does_nothing(operator: Client) -> None:
    do(store.enqueue, job(queue="mail"))
    site = "/admin/relay_queue/"
    for address in (
        "job/?queue=a%00b",
        "job/?task=%00&state__exact=ready",
        "job/?state__exact=%00",
        "job/?verdict=%00",
        "job/?q=key:a%00b",
        "job/?created_at__gte=%00",
        "job/?at=%00",
        "deadletter/?queue=%00",
        "lease/?outcome__exact=%00",
        "lease/?worker__id__exact=%00",
        "lease/?outcome__in=a,%00",
        "worker/?q=%00",
        "worker/?stopped=%00",
        "queue/?q=%00",
        "bulkact/?p=%00",
        "queue/a_00b/change/",
        "queue/a%00b/change/",
        "queue/a%00b/history/",
        "queue/a%00b/limits/",
        "queue/a%00b/act/pause/",
        "job/%00/change/",
        "job/1%00/act/cancel/",
        "queue/a%ED%A0%80b/change/",
        "job/?queue=a%ED%A0%80b",
        "job/?q=task:%ED%A0%80",
    ):
        assert operator.get(site + address).status_code in {200, 302, 404}, address
        with nothing_written():
            assert operator.post(site + address).status_code in {200, 302, 400, 403, 404, 405}, (
                address
            )
    ticked = {"action": "pause", "_selected_action": ["mail", "a\x00b"], "confirmed": "yes"}
    with nothing_written():
        assert operator.post(f"{site}queue/", ticked).status_code == 400
        everything = {"action": "cancel", "select_across": "1", "_selected_action": "0"}
        response = operator.post(f"{site}job/?queue=%00", {**everything, "upper_id": "9" * 30})
    assert response.status_code == 302
