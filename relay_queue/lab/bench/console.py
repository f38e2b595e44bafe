"""How long the pages of the console take on a large database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import path
from django.utils import timezone

from relay_queue.lab.bench.figures import Figure, judge, percentile, timed
from relay_queue.lab.bench.workload import Run
from relay_queue.lab.data import RARE_QUEUE, RARE_TASK, Crowd, load
from relay_queue.lab.processes import LabError
from relay_queue.models import Job, Worker
from relay_queue.states import State

ROUNDS: Final = 12
SLOWEST_NAMED: Final = 5
OK: Final = 200

Query = Mapping[str, Any]


urlpatterns = [path("admin/", admin.site.urls)]
"""The addresses of the scratch project: the admin alone."""


def on_file(run: Run) -> Iterator[Figure]:
    """Measure ``console_page_p95`` and ``console_fragment_p95``."""
    run.on_file("console")
    yield from _visit(run)


def on_server(run: Run) -> Iterator[Figure]:
    """Measure ``pg_console_page_p95`` and ``pg_console_fragment_p95``."""
    with run.on_server():
        yield from _visit(run, "pg_")


def _visit(run: Run, prefix: str = "") -> Iterator[Figure]:
    """Fill the database in use, and open the pages through Django's test client.

    Session, permissions and templates included; only the network is not. Every page is judged by
    its own 95th percentile, and the figure is that of the slowest page.
    """
    crowd = Crowd(
        finished=run.size(1_000_000, 20_000),
        ready=run.size(100_000, 2_000),
        dead=run.size(50_000, 1_000),
        scheduled=run.size(100_000, 2_000),
    )
    run.say(f"filling a database with {crowd.jobs:,} jobs and their ledger")
    load(crowd)
    client = _visitor()
    rounds = run.size(ROUNDS, 3)
    page, fragment = f"{prefix}console_page_p95", f"{prefix}console_fragment_p95"
    if run.wants(page):
        pages = addresses(crowd)
        run.say(f"opening {len(pages)} pages {rounds} times each")
        yield _judge(page, _times(client, pages, rounds), crowd)
    if run.wants(fragment):
        live = {"dashboard": "/admin/relay_queue/dashboard/live/"}
        yield _judge(fragment, _times(client, live, rounds * 5), crowd)


def _judge(name: str, times: Mapping[str, list[float]], crowd: Crowd) -> Figure:
    slowest = sorted(times, key=lambda page: -percentile(times[page], 95))
    return judge(
        name,
        percentile(times[slowest[0]], 95) * 1_000,
        pages=len(times),
        p50_of_all=round(percentile([t for each in times.values() for t in each], 50) * 1_000, 1),
        slowest={
            page: round(percentile(times[page], 95) * 1_000, 1) for page in slowest[:SLOWEST_NAMED]
        },
        finished=crowd.finished,
        ready=crowd.ready,
        dead=crowd.dead,
        scheduled=crowd.scheduled,
    )


def _visitor() -> Client:
    user = User.objects.create_superuser("bench", "bench@example.org", "bench")
    client = Client()
    client.force_login(user)
    return client


def _times(client: Client, pages: Mapping[str, str], rounds: int) -> dict[str, list[float]]:
    """Open every page in turns, so that a slow moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in pages}
    for name in pages:
        _open(client, name, pages[name])  # fills the caches, as the first visitor does
    for _ in range(rounds):
        for name, address in pages.items():
            times[name].append(timed(lambda n=name, a=address: _open(client, n, a)))  # type: ignore[misc]
    return times


def _open(client: Client, name: str, address: str) -> None:
    response = client.get(address)
    if response.status_code != OK:
        raise LabError(f"the page {name!r} ({address}) answered {response.status_code}")


def addresses(crowd: Crowd) -> dict[str, str]:
    """Return the pages that are opened, by a name: every list, filter, jump and search."""
    asked = {**_job_lists(crowd), **_other_lists(), **_searches(crowd)}
    pages = {
        name: f"/admin/relay_queue/{model}/" + (f"?{urlencode(query)}" if query else "")
        for name, (model, query) in asked.items()
    }
    for name, job_id in {"a finished job": 1_001, "a ready job": crowd.jobs}.items():
        pages[name] = f"/admin/relay_queue/job/{job_id}/change/"
    worker_id = Worker.objects.latest("id").pk
    pages["a worker"] = f"/admin/relay_queue/worker/{worker_id}/change/"
    pages["a queue"] = "/admin/relay_queue/queue/mail/change/"
    pages["a dead letter"] = f"/admin/relay_queue/job/{_dead_letter()}/change/"
    return pages


def _dead_letter() -> int:
    dead = Job.objects.filter(state=State.DEAD, finished_at__isnull=False)
    return dead.order_by("-finished_at").values_list("id", flat=True)[0]


def _job_lists(crowd: Crowd) -> dict[str, tuple[str, Query]]:
    last = crowd.jobs // 50
    pages: dict[str, Query] = {"": {}, "page 200": {"p": 200}, "last page": {"p": last}}
    pages |= {f"page {last - 150}": {"p": last - 150}, "from the middle": _middle(crowd)}
    for state in ("scheduled", "ready", "running", "retrying", "succeeded", "dead", "cancelled"):
        pages[state] = {"state__exact": state}
        pages[f"{state} in a queue"] = {"state__exact": state, "queue": "mail"}
        pages[f"{state} of a task"] = {"state__exact": state, "task": "shop.tasks.work_7"}
        pages[f"{state} of a rare task"] = {"state__exact": state, "task": RARE_TASK}
    for verdict in ("never", "running", "once", "interrupted", "repeated"):
        pages[verdict] = {"verdict": verdict}
        pages[f"{verdict} in a queue"] = {"verdict": verdict, "queue": "media"}
        pages[f"{verdict} of a rare task"] = {"verdict": verdict, "task": RARE_TASK}
        pages[f"{verdict} and dead"] = {"verdict": verdict, "state__exact": "dead"}
    for name, query in {"queue": {"queue": "mail"}, "rare queue": {"queue": RARE_QUEUE}}.items():
        pages[name] = query
        pages[f"{name}, last night"] = {**query, **_span("created_at")}
    pages["task"] = {"task": "shop.tasks.work_3"}
    pages["task, page 150"] = {"task": "shop.tasks.work_3", "p": 150}
    for field in ("created_at", "available_at", "finished_at"):
        pages[f"last night by {field}"] = _span(field)
    pages["dead last night of a task"] = {
        "state__exact": "dead",
        "task": "shop.tasks.work_3",
        **_span("finished_at"),
    }
    return {f"jobs {name}".strip(): ("job", query) for name, query in pages.items()}


def _other_lists() -> dict[str, tuple[str, Query]]:
    dead: dict[str, Query] = {
        "": {},
        "page 200": {"p": 200},
        "of a task": {"task": "shop.tasks.work_5"},
        "of a rare task": {"task": RARE_TASK},
        "last night": _span("finished_at"),
        "interrupted": {"verdict": "interrupted"},
        "error": {"q": "error:timeout"},
    }
    leases: dict[str, Query] = {
        "": {},
        "open": {"ended": "no"},
        "acked": {"outcome__exact": "acked"},
        "lost": {"outcome__exact": "lost"},
        "expired": {"outcome__exact": "expired"},
        "refused": {"refused": "yes"},
        "of a rare queue": {"queue": RARE_QUEUE},
        "of a job": {"q": "5001"},
        "page 200": {"p": 200},
    }
    return {
        **{f"dead letters {name}".strip(): ("deadletter", q) for name, q in dead.items()},
        **{f"leases {name}".strip(): ("lease", q) for name, q in leases.items()},
        "retries": ("retry", {}),
        "queues": ("queue", {}),
        "workers": ("worker", {}),
    }


def _searches(crowd: Crowd) -> dict[str, tuple[str, Query]]:
    terms = (
        str(crowd.jobs // 2),
        "id:77",
        "shop.tasks.work_1",
        "task:shop",
        "task:none",
        f"task:{RARE_TASK[:-4]}",
        f"queue:{RARE_QUEUE}",
        "key:key-40000",
        "key:none",
        "error:TimeoutError",
        "error:no address",
        "error:nothing like it",
        "whatever: it is",
    )
    return {f"search {term}": ("job", {"q": term}) for term in terms}


def _middle(crowd: Crowd) -> Query:
    page = crowd.jobs // 100
    return {"p": page + 100, "at": f"{page}~{crowd.jobs // 2}~{crowd.jobs // 2}"}


def _span(field: str) -> Query:
    """Return a night in the middle of the crowd's days, as the fields of the filter say it."""
    night = timezone.now() - timedelta(days=3)
    return {
        f"{field}__range__gte_0": f"{night:%Y-%m-%d}",
        f"{field}__range__gte_1": "00:00",
        f"{field}__range__lte_0": f"{night:%Y-%m-%d}",
        f"{field}__range__lte_1": "06:00",
    }
