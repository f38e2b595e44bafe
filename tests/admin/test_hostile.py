"""Whatever stands in a text field of a job, a page shows it as text: no element, no handler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.admin.utils import quote as quoted
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client

from relay_queue import clock
from relay_queue.models import Job, Lease, Queue, QueueCount, Worker
from tests.store import actions

pytestmark = pytest.mark.django_db

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "javascript:alert(1)",
    "</title><script>alert(1)</script>",
    "</textarea><iframe src=javascript:alert(1)>",
    "</pre><object data=x>",
    "<style>*{display:none}</style>",
    "<!--><script>alert(1)</script-->",
    "<a href=javascript:alert(1)>x</a>",
    "{{ 7|add:7 }}{% debug %}",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "%3Cscript%3Ealert(1)%3C/script%3E",
    "<math><mtext><script>alert(1)</script>",
    "\u202e<b>gnol</b>\u2028<u>",
    "<base href=//evil.example><form action=//evil.example>",
]
HARMLESS = "harmless"


class Shape(HTMLParser):
    """What elements a page has, which handlers, and where it leads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.bad: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        for name, value in attrs:
            if name.startswith("on") or name in {"style", "autofocus", "srcdoc"}:
                self.bad.append(f"{tag} {name}")
            address = (value or "").strip().lower()
            if name in {"href", "src", "action", "data"} and (
                address.startswith(("javascript:", "data:", "//")) or "<" in address
            ):
                self.bad.append(f"{tag} {name}={value}")


@pytest.fixture(autouse=True)
def moment() -> Iterator[None]:
    """Let no time pass: a worker that has been silent for a minute is one more thing to show."""
    now = clock.now()
    with clock.use(lambda: now):
        yield


@pytest.fixture
def admin(admin_user: User) -> Client:
    client = Client()
    client.force_login(admin_user)
    return client


@pytest.fixture
def job() -> Job:
    """Return a job with an attempt that failed late, a worker and a queue: all of harmless text."""
    job_id = actions.enqueue(queue=HARMLESS, task=HARMLESS, idempotency_key=HARMLESS)
    actions.enqueue(queue=HARMLESS, task=HARMLESS)
    held = actions.claim_one(HARMLESS, worker_id=actions.register(name=HARMLESS))
    actions.nack(held, fatal=True, error=HARMLESS, message=HARMLESS, traceback=HARMLESS)
    actions.ack(held)
    spoil(HARMLESS)
    return Job.objects.get(pk=job_id)


def spoil(text: str) -> None:
    """Write a text into every text field there is, past the store, which would refuse some."""
    payload = json.dumps({"args": [text, {text: [text]}], "kwargs": {text: text}})
    fields: dict[Any, dict[str, str]] = {
        Job: {
            "queue": text,
            "task": text,
            "backend": text,
            "payload": payload,
            "result": json.dumps(text),
            "last_error": text,
        },
        Lease: {"error": text, "traceback": text, "refused_reason": text},
        Worker: {"name": text, "host": text, "queues": text, "stop_reason": text, "boot_id": text},
        Queue: {"name": text},
        QueueCount: {"queue": text},
    }
    with connection.cursor() as cursor:
        for model, values in fields.items():
            marks = ", ".join(f"{name} = %s" for name in values)
            cursor.execute(f"UPDATE {model._meta.db_table} SET {marks}", list(values.values()))
        cursor.execute(
            "UPDATE relay_queue_job SET idempotency_key = %s WHERE idempotency_key IS NOT NULL",
            [text],
        )


def pages(job: Job, text: str) -> dict[str, dict[str, str]]:
    """Return every page that shows these rows, with the parameters that a link can carry."""
    lease = Lease.objects.get(job=job)
    echoed = {"q": f"task:{text}", "queue": text, "task": text}
    return {
        "job/": {},
        "job/?": echoed,
        "job/??": {"q": f"none:{text}"},
        "deadletter/": {},
        "deadletter/?": {"q": f"error:{text}"},
        "retry/": {"queue": text},
        "lease/": {},
        "lease/?": {"q": text, "queue": text},
        "queue/": {},
        "queue/{queue}/change/": {},
        "worker/": {},
        "worker/?": {"q": text},
        f"job/{job.pk}/change/": {},
        f"job/{job.pk}/history/": {},
        f"lease/{lease.pk}/change/": {},
        f"worker/{lease.worker_id}/change/": {},
        "dashboard/": {},
        "dashboard/live/": {},
    }


def shapes(client: Client, job: Job, text: str) -> dict[str, Shape]:
    found = {}
    for path, query in pages(job, text).items():
        address = path.rstrip("?").format(queue=quote(quoted(text)))
        response = client.get(f"/admin/relay_queue/{address}", query)
        assert response.status_code == 200, (path, response.status_code)
        found[path] = Shape(response.content.decode())
    return found


@pytest.mark.parametrize(
    "texts",
    [pytest.param(HOSTILE[::2], marks=pytest.mark.thorough), HOSTILE[1::2]],
    ids=["even", "odd"],
)
def test_hostile_text_adds_no_element_and_no_handler(
    admin: Client, job: Job, texts: list[str]
) -> None:
    expected = shapes(admin, job, HARMLESS)
    for text in texts:
        spoil(text)
        for path, shape in shapes(admin, job, text).items():
            assert not shape.bad, (text, path)
            more = shape.elements - expected[path].elements
            assert not more, (text, path, more)


def test_the_check_itself_sees_markup_that_slips_through() -> None:
    shape = Shape("<p>a</p><img src=x onerror=alert(1)><a href='javascript:x'>b</a>")
    assert shape.elements["img"] == 1
    assert len(shape.bad) == 2


def test_the_hostile_texts_are_twenty_and_are_shown(admin: Client, job: Job) -> None:
    assert len(set(HOSTILE)) == 20
    spoil(HOSTILE[0])
    page = admin.get(f"/admin/relay_queue/job/{job.pk}/change/").content.decode()
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 5
