"""Every list shows exactly the rows it was asked for, page by page, with a constant cost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.contrib.auth import get_user
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import resolve
from django.utils import timezone

from relay_queue import store
from relay_queue.admin.lists.changelist import ScanChangeList
from relay_queue.models import Job, Lease
from relay_queue.query import ledger, lists
from relay_queue.verdict import Verdict
from tests.store import actions

pytestmark = pytest.mark.django_db

SIZE = 7
PAGES = 40


@pytest.fixture
def admin(admin_user: User, monkeypatch: pytest.MonkeyPatch) -> Client:
    from relay_queue.admin.reading import ScanningAdmin

    monkeypatch.setattr(ScanningAdmin, "list_per_page", SIZE)
    client = Client()
    client.force_login(admin_user)
    return client


@pytest.fixture
def crowd() -> list[int]:
    """Make some jobs in every state, of three queues and four tasks."""
    new = [
        actions.job(
            task=f"shop.tasks.work_{n % 4}",
            queue=("default", "mail", "rare")[n % 3 if n % 20 else 0],
            priority=n % 3 - 1,
            run_after=timezone.now() + timedelta(hours=n) if n % 10 == 9 else None,
            max_attempts=2,
            idempotency_key=f"key-{n}" if n % 7 == 0 else None,
        )
        for n in range(60)
    ]
    ids = [answer.job_id for answer in actions.do(store.enqueue_many, new)]
    for place, held in enumerate(actions.claim(30, "default", "mail", "rare")):
        _end(place, held)
    actions.do(store.cancel, ids[-3:])
    return ids


def _end(place: int, held: store.Claim) -> None:
    match place % 6:
        case 0 | 1:
            actions.ack(held)
        case 2:
            actions.nack(held, message=f"ValueError: job {held.job_id} has 100% no_address")
        case 3:
            actions.nack(held, fatal=True, message="Fatal: never again")
        case 4:
            actions.do(store.release_leases, [held.job_id])
            actions.ack(held)  # too late


def listed(client: Client, model: str, query: str = "") -> ScanChangeList:
    """Ask for a list as the client's user; its page is not drawn, which takes most of the time."""
    request = RequestFactory().get(f"/admin/relay_queue/{model}/?{query}")
    request.user = get_user(client)
    view, arguments, options = resolve(request.path)
    response = view(request, *arguments, **options)
    assert response.status_code == 200
    found = response.context_data["cl"]
    assert isinstance(found, ScanChangeList)
    return found


def ids_of(found: ScanChangeList) -> list[int]:
    return [row.pk for row in found.result_list]


def walked(client: Client, model: str, query: str = "") -> Iterator[list[int]]:
    """Follow the link to the next page until there is none; yield the ids of each page."""
    for _ in range(PAGES):
        found = listed(client, model, query)
        yield ids_of(found)
        pages = found.pages()
        onward = pages["next"] or pages["beyond"]
        if not onward:
            return
        query = urlsplit(onward).query
    raise AssertionError("the pages have no end")


TODAY = f"{timezone.now():%Y-%m-%d}"
QUERIES = [
    "",
    *(f"state__exact={state}" for state in ("scheduled", "ready", "running", "retrying")),
    *(f"state__exact={state}" for state in ("succeeded", "dead", "cancelled", "nonsense")),
    *(f"verdict={verdict}" for verdict in (*Verdict.values, "nonsense")),
    "queue=mail",
    "queue=none",
    "task=shop.tasks.work_2",
    "queue=default&task=shop.tasks.work_1",
    "state__exact=ready&queue=rare",
    "state__exact=ready&task=shop.tasks.work_3",
    "state__exact=succeeded&queue=mail",
    "state__exact=dead&task=shop.tasks.work_1&verdict=once",
    "verdict=interrupted&queue=mail",
    "verdict=never&state__exact=ready",
    "verdict=never&queue=rare",
    f"created_at__range__gte_0={TODAY}",
    f"created_at__range__lte_0={TODAY}&created_at__range__lte_1=00:00",
    f"finished_at__range__gte_0={TODAY}&task=shop.tasks.work_2",
    f"available_at__range__gte_0={TODAY}&available_at__range__lte_0=2100-01-01",
    f"finished_at__gte={TODAY}T00:00:00%2B00:00&state__exact=dead",
    "q=error:value",
    "q=error:100%25",
    "q=error:no_addr",
    "q=error:noxaddr",
    "q=key:key-14",
    "q=queue:rare",
    "q=task:shop.tasks.work",
    "q=shop.tasks.work_1",
    "q=task:nothing&state__exact=ready",
]


@pytest.mark.parametrize("query", QUERIES)
def test_pages_hold_exactly_the_jobs_that_match(
    admin: Client, crowd: list[int], query: str
) -> None:
    assert admin.get(f"/admin/relay_queue/job/?{query}").status_code == 200
    found = listed(admin, "job", query)
    meant = set(found.queryset.values_list("pk", flat=True))
    pages = list(walked(admin, "job", query))
    flat = [pk for page in pages for pk in page]
    assert len(flat) == len(set(flat)), "a job came twice"
    assert set(flat) == meant
    assert found.page.total == lists.Counted(len(meant), more=False)


@pytest.mark.parametrize("query", QUERIES)
def test_matches_are_found_however_few_rows_one_page_looks_at(
    admin: Client, crowd: list[int], query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "SCAN", 5)
    meant = set(listed(admin, "job", query).queryset.values_list("pk", flat=True))
    assert {pk for page in walked(admin, "job", query) for pk in page} == meant


@pytest.mark.parametrize("query", ["", "state__exact=ready", "queue=mail", "q=task:shop"])
def test_every_jump_shows_the_page_that_it_names(
    admin: Client, crowd: list[int], query: str
) -> None:
    pages = list(walked(admin, "job", query))
    for number, page in enumerate(pages, start=1):
        found = listed(admin, "job", f"{query}&p={number}")
        assert ids_of(found) == page
        links = found.pages()
        shown = [*links["numbers"], links["first"], links["last"]]
        for link in filter(None, shown):
            if link.address:
                assert ids_of(listed(admin, "job", link.address[1:])) == pages[link.number - 1]
        if links["previous"]:
            assert ids_of(listed(admin, "job", links["previous"][1:])) == pages[number - 2]


@pytest.mark.parametrize("query", ["", "q=task:shop"])
def test_every_page_is_read_from_whatever_is_near_it_and_one_too_far_is_named(
    admin: Client, crowd: list[int], query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = list(walked(admin, "job", query))
    size = len(pages[0])
    monkeypatch.setattr("relay_queue.admin.lists.changelist.REACH", 2 * size)
    middle = parse_qsl(listed(admin, "job", f"{query}&p=3").pages()["next"][1:])
    for anchor in ("", dict(middle)["at"]):
        for number in range(1, len(pages) + 4):
            found = listed(admin, "job", f"{query}&p={number}&at={anchor}").page
            assert [place.id for place in found.places] == pages[found.number - 1]
            assert found.too_far or found.number == min(number, len(pages))
            assert found.has_next is (found.number < len(pages))


def test_jobs_that_arrive_do_not_push_others_from_page_to_page(
    admin: Client, crowd: list[int]
) -> None:
    first, second = [ids_of(found) for found in _two_pages(admin)]
    onward = listed(admin, "job").pages()["next"]
    actions.enqueue_each(3)
    assert ids_of(listed(admin, "job", onward[1:])) == second
    assert not set(first) & set(second)


def _two_pages(admin: Client) -> Iterator[ScanChangeList]:
    found = listed(admin, "job")
    yield found
    yield listed(admin, "job", found.pages()["next"][1:])


@pytest.mark.parametrize("at", ["", "x", "3~~", "2~9~x", "1~2026-01-01~7", "0~1~1", "9" * 60])
def test_an_anchor_that_makes_no_sense_is_the_start(
    admin: Client, crowd: list[int], at: str
) -> None:
    assert ids_of(listed(admin, "job", f"at={at}")) == ids_of(listed(admin, "job"))


def test_dead_letters_come_latest_first_and_retries_soonest_first(
    admin: Client, crowd: list[int]
) -> None:
    dead = [pk for page in walked(admin, "deadletter") for pk in page]
    assert dead == list(
        Job.objects.filter(state="dead")
        .order_by("-finished_at", "-pk")
        .values_list("pk", flat=True)
    )
    retries = [pk for page in walked(admin, "retry") for pk in page]
    assert retries == list(
        Job.objects.filter(state="retrying")
        .order_by("available_at", "pk")
        .values_list("pk", flat=True)
    )
    assert dead
    assert retries


@pytest.mark.parametrize(
    "query",
    [
        "",
        "ended=no",
        "ended=yes&queue=mail",
        "outcome__exact=failed",
        "outcome__exact=acked",
        "outcome__in=failed,released",
        "refused=yes",
        "refused=no",
        "acquired_at__range__gte_0=2100-01-01",
    ],
)
def test_leases_are_found_by_how_they_stand(admin: Client, crowd: list[int], query: str) -> None:
    meant = set(listed(admin, "lease", query).queryset.values_list("pk", flat=True))
    assert {pk for page in walked(admin, "lease", query) for pk in page} == meant
    assert meant or "2100" in query


def test_leases_of_a_job_are_found_by_its_id(admin: Client, crowd: list[int]) -> None:
    lease = Lease.objects.first()
    assert lease is not None
    assert ids_of(listed(admin, "lease", f"q={lease.job_id}")) == [lease.pk]


@pytest.mark.parametrize(
    ("term", "said"),
    [("whatever:x", "not a kind of search"), ("key:", "Write something"), ("id:x", "not the id")],
)
def test_a_search_that_means_nothing_says_why(
    admin: Client, crowd: list[int], term: str, said: str
) -> None:
    response = admin.get("/admin/relay_queue/job/", {"q": term})
    assert said in response.content.decode()
    assert response.context["cl"].result_list == []


@pytest.mark.parametrize("page", ["job/", "deadletter/", "retry/", "lease/", "queue/", "worker/"])
def test_number_of_statements_does_not_grow_with_the_rows(
    admin: Client, crowd: list[int], page: str
) -> None:
    with CaptureQueriesContext(
        connection,
    ) as few:
        admin.get(f"/admin/relay_queue/{page}")
    for n in range(40):
        held = actions.claim(1, worker_id=actions.register(name=f"w{n}"))
        for claim in held:
            actions.nack(claim, fatal=n % 2 == 0)
        actions.enqueue(queue=f"queue-{n}", task=f"shop.tasks.more_{n}")
    with CaptureQueriesContext(connection) as many:
        admin.get(f"/admin/relay_queue/{page}")
    assert len(many) == len(few)
    assert len(many) <= 12


def test_job_page_takes_the_same_statements_for_every_job(admin: Client, crowd: list[int]) -> None:
    counts = set()
    admin.get(f"/admin/relay_queue/job/{crowd[0]}/change/")  # fills what the process remembers
    for job in Job.objects.filter(idempotency_key=None)[:10]:
        with CaptureQueriesContext(connection) as noted:
            admin.get(f"/admin/relay_queue/job/{job.pk}/change/")
        counts.add(len(noted))
    assert len(counts) == 1


@pytest.mark.parametrize("page", ["job/", "deadletter/?verdict=once", "lease/?outcome__exact=lost"])
def test_reading_never_asks_for_the_write_lock(admin: Client, crowd: list[int], page: str) -> None:
    with CaptureQueriesContext(connection) as noted:
        admin.get(f"/admin/relay_queue/{page}")
    statements = [query["sql"].upper() for query in noted]
    assert statements
    assert not [s for s in statements if s.startswith(("BEGIN", "SAVEPOINT", "INSERT", "UPDATE"))]


def test_verdict_beside_a_job_is_that_of_its_ledger(admin: Client, crowd: list[int]) -> None:
    for verdict in Verdict:
        meant = ledger.filter_by_verdict(Job.objects.all(), verdict)
        for job in listed(admin, "job", f"verdict={verdict.value}").result_list:
            assert job.verdict == verdict.value
            assert job in meant


def test_ready_jobs_come_in_the_order_in_which_they_are_claimed(
    admin: Client, crowd: list[int]
) -> None:
    shown = [pk for page in walked(admin, "job", "state__exact=ready&queue=mail") for pk in page]
    assert shown == actions.claimed_ids(100, "mail")


def test_links_keep_the_filters(admin: Client, crowd: list[int]) -> None:
    onward = listed(admin, "job", "queue=mail&q=task:shop").pages()["next"]
    assert {("queue", "mail"), ("q", "task:shop"), ("p", "2")} <= set(parse_qsl(onward[1:]))


def test_pages_never_overlap_in_time(admin: Client, crowd: list[int]) -> None:
    pages = list(walked(admin, "job"))
    assert all(min(one) > max(two) for one, two in pairwise(pages))


def test_a_page_beyond_the_end_is_the_last(admin: Client, crowd: list[int]) -> None:
    last: Any = list(walked(admin, "job"))[-1]
    assert ids_of(listed(admin, "job", "p=99999")) == last
