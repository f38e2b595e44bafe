"""What Prometheus is told, and who may ask."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.test import RequestFactory
from prometheus_client.parser import text_string_to_metric_families

from relay_queue import clock, conf, metrics, store
from tests import tasks
from tests.conftest import ROOT
from tests.store import actions

TOKEN = "0123456789abcdef"

pytestmark = pytest.mark.django_db

Samples = dict[tuple[str, ...], float]


@pytest.fixture
def scrape(settings: Any) -> Iterator[Any]:
    """Return a function that scrapes; samples are keyed by name and values, labels by alphabet."""
    settings.RELAY = {**settings.RELAY, "METRICS_TOKEN": TOKEN}

    def ask() -> Samples:
        request = RequestFactory().get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
        answer = metrics.view(request)
        assert answer.status_code == 200
        families = text_string_to_metric_families(answer.content.decode())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    return ask


def test_jobs_are_told_by_queue_and_state(scrape: Any) -> None:
    tasks.note.enqueue(1)
    tasks.note.using(queue_name="mail").enqueue(2)
    actions.claim(1)
    found = scrape()
    assert found["relay_jobs", "default", "running"] == 1
    assert found["relay_jobs", "mail", "ready"] == 1
    assert found["relay_jobs", "mail", "dead"] == 0, "a sample that is missing raises no alert"


def test_limits_pauses_and_waits_are_told(scrape: Any) -> None:
    tasks.note.enqueue(1)
    actions.do(store.set_limits, "default", capacity=7, max_running=None)
    actions.do(store.pause, "default")
    later = clock.now() + timedelta(hours=1)
    with clock.use(lambda: later):
        found = scrape()
    assert found["relay_queue_capacity", "default"] == 7
    assert found["relay_queue_paused", "default"] == 1
    assert found["relay_oldest_ready_seconds", "default"] > 3000


def test_events_are_counted_since_midnight(scrape: Any) -> None:
    now = clock.now()
    minute = now.replace(second=0, microsecond=0)
    totals = store.Totals(claimed=5, succeeded=3, failed=2, retried=1, died=1, refused=4)
    totals.wait, totals.run = {10: 5}, {20: 5}
    yesterday = {("default", minute - timedelta(days=1)): totals}
    actions.do(store.roll_up, 1, {("default", minute): totals})
    actions.do(store.roll_up, 2, {("default", minute): totals, **yesterday})
    found = scrape()
    assert found["relay_events_total", "succeeded", "default"] == 6
    assert found["relay_events_total", "refused", "default"] == 8
    assert 0.0005 < found["relay_wait_seconds", "0.5"] < 0.0011
    assert 0.5 < found["relay_run_seconds", "0.95"] < 1.1


def test_live_workers_are_told_one_by_one(scrape: Any) -> None:
    worker = actions.register(name="w", host="h", concurrency=8)
    stopped = actions.register(name="x", host="h")
    actions.do(store.stop_workers, [stopped], "stopped")
    tasks.note.enqueue(1)
    actions.claim(1, worker_id=worker)
    found = scrape()
    assert found["relay_workers",] == 1
    assert found["relay_worker_leases", "h", f"w-{worker}"] == 1
    assert found["relay_worker_slots", "h", f"w-{worker}"] == 8
    assert found["relay_worker_heartbeat_age_seconds", "h", f"w-{worker}"] < 60


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=x",
        "text/plain;escaping=allow-utf-8;version=abc",
        "application/openmetrics-text;version=1.0.0.0rc1+\u00e9",
        "text/plain;version=;version",
        ",;=,",
        "\x00",
        "x" * 10_000,
    ],
)
def test_a_scraper_that_asks_for_nonsense_gets_the_metrics(settings: Any, accept: str) -> None:
    settings.RELAY = {**settings.RELAY, "METRICS_TOKEN": TOKEN}
    headers = {"authorization": f"Bearer {TOKEN}", "accept": accept}
    answer = metrics.view(RequestFactory().get("/metrics", headers=headers))
    assert answer.status_code == 200
    assert b"relay_jobs" in answer.content


def test_a_scraper_that_asks_for_the_open_format_gets_it(settings: Any) -> None:
    settings.RELAY = {**settings.RELAY, "METRICS_TOKEN": TOKEN}
    accept = "application/openmetrics-text; version=1.0.0"
    headers = {"authorization": f"Bearer {TOKEN}", "accept": accept}
    answer = metrics.view(RequestFactory().get("/metrics", headers=headers))
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert answer.content.endswith(b"# EOF\n")


@pytest.mark.parametrize("said", ["", "Bearer", "Bearer wrong", TOKEN, f"Bearer {TOKEN}x", "ü"])
def test_without_the_token_nobody_is_answered(settings: Any, said: str) -> None:
    settings.RELAY = {**settings.RELAY, "METRICS_TOKEN": TOKEN}
    request = RequestFactory().get("/metrics", headers={"authorization": said})
    request.user = AnonymousUser()
    answer = metrics.view(request)
    assert (answer.status_code, b"METRICS_TOKEN" in answer.content) == (403, True)


@pytest.mark.parametrize("said", ["Bearer None", "Bearer "])
def test_without_a_token_in_the_settings_no_token_is_right(said: str) -> None:
    assert conf.get().metrics_token is None
    request = RequestFactory().get("/metrics", headers={"authorization": said})
    assert metrics.view(request).status_code == 403


@pytest.mark.parametrize(
    ("lacks", "status"),
    [("", 200), ("permission", 403), ("is_staff", 403), ("is_active", 403)],
)
def test_staff_who_may_view_queues_need_no_token(lacks: str, status: int) -> None:
    flags = {name: name != lacks for name in ("is_staff", "is_active")}
    user = User.objects.create_user("operator", **flags)
    if lacks != "permission":
        user.user_permissions.add(Permission.objects.get(codename="view_queue"))
    request = RequestFactory().get("/metrics")
    request.user = User.objects.get(pk=user.pk)
    assert metrics.view(request).status_code == status


@pytest.mark.parametrize("lacks", ["is_staff", "is_active"])
def test_superuser_who_may_not_enter_the_admin_is_refused(lacks: str) -> None:
    user = User.objects.create_superuser("root")
    setattr(user, lacks, False)
    request = RequestFactory().get("/metrics")
    request.user = user
    assert metrics.view(request).status_code == 403


def test_nothing_but_reading_is_allowed() -> None:
    assert metrics.view(RequestFactory().post("/metrics")).status_code == 405


def test_every_metric_is_documented_and_the_other_way_round(scrape: Any) -> None:
    tasks.note.enqueue(1)
    actions.do(store.set_limits, "default", capacity=7, max_running=None)
    actions.register()
    minute = clock.now().replace(second=0, microsecond=0)
    totals = store.Totals(claimed=1, wait={10: 1}, run={10: 1})
    actions.do(store.roll_up, 1, {("default", minute): totals})
    page = (ROOT / "docs/deploying/monitoring.md").read_text()
    documented = set(re.findall(r"^\| `(relay_\w+)`", page, re.MULTILINE))
    assert documented == {name for name, *_ in scrape()}
    alerts = set(re.findall(r"\brelay_[a-z_]+", page.partition("## Alerts")[2]))
    assert alerts - {"relay_queue_job", "relay_queue_lease"} <= documented
