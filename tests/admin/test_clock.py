"""Every page of the console counts to one time: the database's, read once for a request."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.contrib.auth.models import User
from django.test import Client

from relay_queue import clock
from relay_queue.models import BulkAct
from relay_queue.query import looks
from tests.store import actions

pytestmark = pytest.mark.django_db

AHEAD = timedelta(hours=3)

PAGES = (
    "job/",
    "job/{job}/change/",
    "deadletter/",
    "retry/",
    "lease/",
    "lease/{lease}/change/",
    "queue/",
    "queue/default/change/",
    "worker/",
    "worker/{worker}/change/",
    "bulkact/",
    "dashboard/",
)
"""All pages that show how long ago something was, or in how long it is due."""

COUNTING = ("job/", "job/{job}/change/", "lease/", "worker/", "worker/{worker}/change/", "bulkact/")
"""Those of them on which something of the crowd below is as old as the clock is ahead."""


@pytest.fixture
def admin(admin_user: User) -> Client:
    client = Client()
    client.force_login(admin_user)
    return client


@pytest.fixture
def ids(db: None) -> dict[str, int]:
    """Return the ids of a running job, its lease and its worker; a bulk act is there, too."""
    worker = actions.register()
    actions.enqueue()
    claim = actions.claim_one(worker_id=worker)
    BulkAct.objects.create(act="cancel", nonce="n", upper_id=1, created_at=clock.now())
    return {"job": claim.job_id, "lease": claim.lease_id, "worker": worker}


@pytest.mark.parametrize("page", COUNTING)
def test_ages_are_counted_by_the_clock_of_the_database(
    admin: Client, ids: dict[str, int], page: str
) -> None:
    now = clock.now() + AHEAD
    with clock.use(lambda: now):  # which is the clock of a database in a file
        response = admin.get(f"/admin/relay_queue/{page.format(**ids)}")
    assert response.status_code == 200
    assert "3 h" in response.content.decode()


@pytest.mark.parametrize(("seconds", "is_silent"), [(59, False), (61, True)])
def test_worker_is_silent_after_a_minute_on_every_page(
    admin: Client, ids: dict[str, int], seconds: int, is_silent: bool
) -> None:
    now = clock.now() + timedelta(seconds=seconds)
    for page in ("worker/", "worker/{worker}/change/", "queue/default/change/", "dashboard/"):
        with clock.use(lambda: now):
            text = admin.get(f"/admin/relay_queue/{page.format(**ids)}").content.decode()
        assert ("Silent" in text) is is_silent, page


@pytest.mark.parametrize("page", PAGES)
def test_the_clock_is_read_once_for_a_page(
    admin: Client, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    readings: list[datetime] = []

    def now() -> datetime:
        readings.append(clock.now())
        return readings[-1]

    monkeypatch.setattr(looks, "now", now)
    assert admin.get(f"/admin/relay_queue/{page.format(**ids)}").status_code == 200
    assert len(readings) <= 1
