"""The pages of one queue and of one worker: what they show, to whom, and at what cost."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from relay_queue import clock, store
from relay_queue.admin import workers
from relay_queue.models import Worker
from relay_queue.states import WorkerOrder
from tests.admin.acting import person
from tests.store import actions

pytestmark = pytest.mark.django_db

QUEUE = "/admin/relay_queue/queue/mail/change/"
WORKER = "/admin/relay_queue/worker/{}/change/"


def words(client: Client, address: str) -> str:
    """Return what a page says, without its markup."""
    response = client.get(address)
    assert response.status_code == 200
    main = response.content.decode().partition('<div id="content-main"')[2]
    return " ".join(re.sub(r"<[^>]*>", " ", main).split())


def only(*codenames: str) -> Client:
    """Return the browser of somebody who may view what is named, and nothing else."""
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def worker() -> int:
    """Leave a worker that holds one job, and had one that failed and one that was acked."""
    worker_id = actions.register(name="anna", queues=["mail", "other"], concurrency=4)
    actions.enqueue_each(5, queue="mail")
    acked, failed, _held = actions.claim(3, "mail", worker_id=worker_id)
    actions.ack(acked)
    actions.nack(failed, fatal=True, error="builtins.ValueError")
    minute = clock.now().replace(second=0, microsecond=0)
    totals = store.Totals(claimed=3, succeeded=1, failed=1, died=1, wait={10: 2}, run={20: 2})
    actions.do(store.roll_up, worker_id, {("mail", minute): totals})
    actions.do(store.heartbeat, worker_id, totals)
    return worker_id


def test_queue_page_shows_depths_limits_work_and_who_serves_it(worker: int) -> None:
    actions.do(store.set_limits, "mail", capacity=10, max_running=2)
    page = words(person(), QUEUE)
    for said in (
        "Open",
        "Ready 2",
        "Running 1",
        "Succeeded 1",
        "Dead 1",
        "Capacity 3 of 10",
        "Max running 1 of 2",
        "Aging one class in 1 min",
        "Failed attempts 1 (50.0 %)",
        "Alive anna (host, pid 1)",
        "1 succeeded, 1 attempt failed",
        "All ready jobs, in this order",
    ):
        assert said in page


def test_queue_page_leads_to_the_lists_behind_its_numbers(worker: int) -> None:
    page = person().get(QUEUE).content.decode()
    for state in ("ready", "running", "succeeded", "dead"):
        assert f"/job/?state__exact={state}&amp;queue=mail" in page
    assert "state__exact=retrying" not in page, "there is none"
    assert f"/worker/{worker}/change/" in page


def test_queue_page_says_what_is_not_there() -> None:
    actions.do(store.ensure_queue, "mail")
    actions.do(store.pause, "mail")
    page = words(person(), QUEUE)
    for said in (
        "Paused Nothing is claimed from it",
        "no limit",
        "Oldest wait –",
        "No attempt has ended in this time",
        "No job is ready",
        "None: its jobs wait until a worker is started",
    ):
        assert said in page


def test_worker_page_shows_what_it_holds_and_what_it_had(worker: int) -> None:
    client = person()
    page = words(client, WORKER.format(worker))
    held, _, had = page.partition("Last hour, by minute")
    for said in ("Alive", "Slots 4", "Queues mail , other", "Failed 1 (50.0 %)", "1 of 4"):
        assert said in held
    assert re.search(r"Open leases 1 of 4 .* anything tests\.tasks mail 1", held)
    assert re.search(r"Fatal anything tests\.tasks mail 1 .* builtins\.ValueError", had)
    assert "Acked" in had
    raw = client.get(WORKER.format(worker)).content.decode()
    assert f"/lease/?worker__id__exact={worker}" in raw
    assert "/queue/mail/change/" in raw


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (WorkerOrder.QUIET, "Quiet Told to be quiet: it claims nothing more. (under 1 s ago)"),
        (WorkerOrder.STOP, "Stopping Told to stop: it finishes what runs, and ends."),
    ],
)
def test_worker_page_shows_the_order_that_stands(
    worker: int, order: WorkerOrder, said: str
) -> None:
    actions.do(store.order_workers, [worker], order)
    assert said in words(person(), WORKER.format(worker))


def test_page_of_a_worker_that_has_ended_says_why_and_what_it_had_then(worker: int) -> None:
    actions.do(store.recover_dead, [worker])
    actions.do(store.stop_workers, [worker], "died: its lock was free")
    Worker.objects.update(ordered=WorkerOrder.STOP)
    page = words(person(), WORKER.format(worker))
    assert "Stopped died: its lock was free" in page
    assert "Told to" not in page
    assert "It holds none any more" in page
    assert "Lost" in page


def test_more_leases_than_are_shown_are_said_to_be_there(
    worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MOST_OPEN", 1)
    actions.claim(2, "mail", worker_id=worker)
    page = words(person(), WORKER.format(worker))
    assert "There are more" in page


def test_each_part_of_a_page_needs_the_permission_to_view_it(worker: int) -> None:
    client = only("view_queue", "view_worker")
    page = client.get(QUEUE).content.decode()
    assert "Next in line" not in page
    assert "state__exact" not in page
    assert "anna" in page
    page = client.get(WORKER.format(worker)).content.decode()
    assert "Open leases" not in page
    assert "ValueError" not in page
    User.objects.get(username="viewer").user_permissions.remove(
        Permission.objects.get(codename="view_worker")
    )
    client.force_login(User.objects.get(username="viewer"))
    assert "anna" not in client.get(QUEUE).content.decode()
    assert client.get(WORKER.format(worker)).status_code == 403


def test_acts_stand_on_the_pages_for_those_who_may(worker: int) -> None:
    client = person("pause_queue", "limit_queue", "stop_worker")
    page = client.get(QUEUE).content.decode()
    assert f"{QUEUE[:-7]}act/pause/" in page
    assert f"{QUEUE[:-7]}limits/" in page
    assert f"/worker/{worker}/act/quiet/" in client.get(WORKER.format(worker)).content.decode()


def statements(client: Client, address: str) -> int:
    client.get(address)  # what is kept for a session is read now
    with CaptureQueriesContext(
        connection,
    ) as captured:
        assert client.get(address).status_code == 200
    return len(captured)


def test_pages_cost_the_same_however_much_there_is(worker: int) -> None:
    client = person()
    addresses = (QUEUE, WORKER.format(worker))
    before = [statements(client, address) for address in addresses]
    assert max(before) <= 16
    actions.enqueue_each(20, queue="mail")
    for held in actions.claim(15, "mail", worker_id=worker):
        if held.lease_id % 2:
            actions.nack(held)
    for n in range(5):
        actions.register(name=f"worker-{n}")
    assert [statements(client, address) for address in addresses] == before


def test_queue_that_is_older_than_an_hour_shows_only_the_last(worker: int) -> None:
    minute = clock.now().replace(second=0, microsecond=0) - timedelta(hours=2)
    totals: Any = store.Totals(succeeded=77)
    actions.do(store.roll_up, 5, {("mail", minute): totals, ("other", minute): totals})
    assert "1 succeeded, 1 attempt failed" in words(person(), QUEUE)
