"""What the page of one worker shows: what it is, what it holds, and what it had last."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.text import format_lazy
from django.utils.translation import gettext as _

from relay_queue.admin import attempts, cells, sight, words
from relay_queue.admin.dashboard import charts, panels
from relay_queue.admin.dashboard.links import Links, linked
from relay_queue.admin.facts import Fact
from relay_queue.admin.lists import names
from relay_queue.models import Lease, Worker
from relay_queue.query import history, looks, status
from relay_queue.query.history import RecentStats
from relay_queue.states import WorkerOrder

MOST_OPEN: Final = 100
MOST_ENDED: Final = 20


def context(request: HttpRequest, worker: Worker, links: Links) -> dict[str, Any]:
    """Return what the template of the page needs."""
    now = looks.now()
    return {
        "worker": worker,
        "badge": panels.worker_badge(worker, _since(worker.heartbeat_at, now)),
        "order": _order(worker, now),
        "facts": _facts(worker, now),
        **_done(request, worker, now, links),
        "attempts_url": links.attempts_of(worker.pk),
        **_leases(request, worker, now, links),
    }


def _done(request: HttpRequest, worker: Worker, now: datetime, links: Links) -> dict[str, Any]:
    """Return what it serves and did, for those who may see all jobs that this is about."""
    queues = panels.queues_of(worker)
    if not sight.counters_tell(request, links.site, Worker):
        seen = names.shown(request, links.site).queues
        return {"may_see_counts": False, "serves": _linked(seen, queues, links) if queues else []}
    hour = history.recent(now, worker_id=worker.pk)
    return {
        "may_see_counts": True,
        "serves": _linked(queues, queues, links),
        "totals": _totals(worker, hour),
        "chart": charts.throughput(
            "hour", _("Last hour, by minute"), hour.spans, timedelta(minutes=1)
        ),
    }


def _linked(seen: list[str], queues: list[str], links: Links) -> list[SafeString]:
    """Return the queues that may be seen, each with its page, and dots for the others."""
    shown = [linked(name, links.queue(name)) for name in queues if name in set(seen)]
    return shown if len(shown) == len(queues) else [*shown, linked("…", "")]


def _leases(request: HttpRequest, worker: Worker, now: datetime, links: Links) -> dict[str, Any]:
    """Return what it holds and what it had last, for those who may view leases."""
    if not sight.may_view(request, links.site, Lease):
        return {"may_see_leases": False}
    leases = attempts.leases(request, links.site)
    held = leases.filter(worker=worker.pk, ended_at__isnull=True)
    found = sorted(held.order_by("expires_at")[: MOST_OPEN + 1], key=lambda each: each.acquired_at)
    ended = attempts.read(leases, status.recent_leases(worker, MOST_ENDED))
    return {
        "may_see_leases": True,
        "held": attempts.rows(found[:MOST_OPEN], now, links),
        "held_more": len(found) > MOST_OPEN,
        "held_url": links.held_by(worker.pk),
        "slots": panels.slots_meter(min(len(found), MOST_OPEN), worker.concurrency),
        "ended": attempts.rows(ended, now, links),
    }


def _order(worker: Worker, now: datetime) -> SafeString | str:
    """Say what an operator has told it, and when, while that still matters."""
    if not worker.ordered or worker.stopped_at is not None:
        return ""
    told = {
        WorkerOrder.QUIET: _("Told to be quiet: it claims nothing more."),
        WorkerOrder.STOP: _("Told to stop: it finishes what runs, and ends."),
    }
    text = told.get(WorkerOrder(worker.ordered), "") if worker.ordered in told else worker.ordered
    when = "" if worker.ordered_at is None else words.age(_since(worker.ordered_at, now))
    return f"{text} ({when})" if when else str(text)


def _facts(worker: Worker, now: datetime) -> list[Fact]:
    facts = [
        Fact(_("Host"), worker.host),
        Fact(_("Process"), _("pid %(pid)s") % {"pid": worker.pid}),
        Fact(_("Slots"), words.number(worker.concurrency)),
        Fact(_("Started"), _moment(worker.started_at, now)),
        Fact(_("Heartbeat"), _moment(worker.heartbeat_at, now)),
    ]
    if worker.stopped_at is not None:
        facts.append(Fact(_("Ended"), _moment(worker.stopped_at, now)))
        facts.append(Fact(_("Why"), worker.stop_reason or "–"))
        served = _since(worker.started_at, worker.stopped_at)
        facts.append(Fact(_("Served for"), words.duration(words.whole(served))))
    facts.append(Fact(_("Id"), worker.pk))
    return facts


def _totals(worker: Worker, hour: RecentStats) -> list[Fact]:
    ended = worker.succeeded + worker.failed
    share = worker.failed / ended if ended else None
    lately = history.total(hour.spans)
    return [
        Fact(_("Claimed"), words.number(worker.claimed)),
        Fact(_("Succeeded"), words.number(worker.succeeded)),
        Fact(_("Failed"), f"{words.number(worker.failed)} ({words.percent(share)})"),
        Fact(_("Refused"), words.number(worker.refused)),
        Fact(
            _("In the last hour"),
            _("%(succeeded)s succeeded, %(failed)s failed")
            % {"succeeded": words.number(lately.succeeded), "failed": words.number(lately.failed)},
        ),
        *(
            Fact(format_lazy("{} {}", _("Run"), name), value)
            for name, value in panels.percentiles(hour.run)[:2]
        ),
    ]


def _moment(when: datetime, now: datetime) -> SafeString:
    return cells.ago(when, now)


def _since(when: datetime, now: datetime) -> float:
    return max(0.0, (now - when).total_seconds())
