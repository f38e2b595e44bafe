"""What the page of one queue shows: how it stands, what was done lately, and who serves it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from relay_queue.admin import badges, cells, sight, words
from relay_queue.admin.dashboard import charts, panels
from relay_queue.admin.dashboard.links import Links, counted, linked
from relay_queue.admin.facts import Fact
from relay_queue.models import Job, Queue, Worker
from relay_queue.query import history, looks, status
from relay_queue.query.history import RecentStats
from relay_queue.query.status import LOOKED_AT_FOR_OLDEST, QueueStatus
from relay_queue.states import State

MOST_NEXT: Final = 5
NEXT_LOOKED_AT: Final = 100
"""Jobs next in line among which those are looked for that a person may see."""
MOST_WORKERS: Final = 20
WORKERS_LOOKED_AT: Final = 500


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that will be claimed soon."""

    job: SafeString
    task: SafeString
    priority: SafeString
    waits: SafeString


def context(request: HttpRequest, queue: Queue, links: Links) -> dict[str, Any]:
    """Return what the template of the page needs."""
    now = looks.now()
    return {
        "queue": queue,
        "badge": claims(queue),
        **_standing(request, queue, now, links),
        **_next(request, queue, now, links),
        **_workers(request, queue, now, links),
    }


def _standing(request: HttpRequest, queue: Queue, now: datetime, links: Links) -> dict[str, Any]:
    """Return what the counters tell, for those who may see all jobs that they count."""
    if not sight.counters_tell(request, links.site, Queue):
        limits = ((_("Capacity"), queue.capacity), (_("Max running"), queue.max_running))
        shown = [Fact(name, _("no limit") if n is None else words.number(n)) for name, n in limits]
        return {"may_see_counts": False, "facts": [*shown, *_settings(queue, now)]}
    found = status.queue_status(queue, now)
    hour = history.recent(now, queue=queue.pk)
    return {
        "may_see_counts": True,
        "capacity": panels.capacity_meter(found.unfinished, queue.capacity),
        "running": panels.running_meter(found.counts.get(State.RUNNING, 0), queue.max_running),
        "facts": [_oldest_wait(found), *_settings(queue, now)],
        "depths": [
            (badges.state_badge(state), counted(found.counts.get(state, 0), address))
            for state in State
            for address in [links.jobs(state, queue.pk)]
        ],
        "pieces": panels.pieces(found),
        "lately": _lately(hour),
        "chart": charts.throughput(
            "hour", _("Last hour, by minute"), hour.spans, timedelta(minutes=1)
        ),
    }


def claims(queue: Queue) -> SafeString:
    """Return the badge of whether workers claim from a queue."""
    if queue.paused_at is None:
        return badges.badge("running", _("Open"), badges.PLAY)
    return badges.badge("paused", _("Paused"), badges.PAUSE)


def _oldest_wait(found: QueueStatus) -> Fact:
    waited = words.duration(found.oldest_wait_seconds)
    if found.counts.get(State.READY, 0) > LOOKED_AT_FOR_OLDEST:
        waited = f"≥ {waited}"
    return Fact(_("Oldest wait"), waited)


def _settings(queue: Queue, now: datetime) -> list[Fact]:
    aging = _("none: strict priority")
    if queue.aging_seconds is not None:
        aging = _("one class in %(time)s") % {"time": words.duration(queue.aging_seconds)}
    facts = [Fact(_("Aging"), aging)]
    if queue.paused_at is not None:
        facts.append(Fact(_("Paused"), cells.ago(queue.paused_at, now)))
    return [*facts, Fact(_("Created"), cells.ago(queue.created_at, now))]


def _lately(hour: RecentStats) -> list[Fact]:
    done = history.total(hour.spans)
    facts = [
        Fact(_("Succeeded"), words.number(done.succeeded)),
        Fact(_("Failed attempts"), f"{words.number(done.failed)} ({_share(done.failure_rate)})"),
        Fact(_("Retried"), words.number(done.retried)),
        Fact(_("Died"), words.number(done.died)),
    ]
    for name, histogram in ((_("Wait"), hour.wait), (_("Run"), hour.run)):
        shown = " · ".join(" ".join(pair) for pair in panels.percentiles(histogram)[:2])
        facts.append(Fact(name, shown if histogram.total else "–"))
    return facts


def _share(failure_rate: float | None) -> str:
    return words.percent(failure_rate)


def _next(request: HttpRequest, queue: Queue, now: datetime, links: Links) -> dict[str, Any]:
    """Return the jobs next in line, for those who may view jobs."""
    if not sight.may_view(request, links.site, Job):
        return {"may_see_jobs": False}
    pks = status.next_in_line(queue.pk, NEXT_LOOKED_AT)
    jobs = sight.jobs(request, links.site).defer("payload", "result")
    if not sight.limits_jobs(request, links.site):
        pks = pks[:MOST_NEXT]
    seen = jobs.in_bulk(pks)
    found: list[Any] = [seen[pk] for pk in pks if pk in seen][:MOST_NEXT]
    for job in found:
        job.aging_seconds = queue.aging_seconds
    return {
        "may_see_jobs": True,
        "next": [
            Waiting(
                job=linked(job.pk, links.job(job.pk)),
                task=cells.task(job),
                priority=cells.priority(job, now),
                waits=words.moment(job.available_at, _waited(job, now)),
            )
            for job in found
        ],
        "ready_url": links.jobs(State.READY, queue.pk),
    }


def _waited(job: Job, now: datetime) -> str:
    return words.duration(words.whole(max(0.0, (now - job.available_at).total_seconds())))


def _workers(request: HttpRequest, queue: Queue, now: datetime, links: Links) -> dict[str, Any]:
    """Return the workers that serve the queue, for those who may view workers."""
    if not sight.may_view(request, links.site, Worker):
        return {"may_see_workers": False}
    live = sight.rows(request, links.site, Worker).filter(stopped_at__isnull=True)
    live = live.order_by("name", "id")[:WORKERS_LOOKED_AT]
    serving = [row for row in live if panels.serves(row, queue.pk)]
    shown = [
        (
            linked(row, links.worker(row.pk)),
            panels.worker_badge(row, (now - row.heartbeat_at).total_seconds()),
        )
        for row in serving[:MOST_WORKERS]
    ]
    more = len(serving) - len(shown)
    return {"may_see_workers": True, "workers": shown, "more_workers": more}
