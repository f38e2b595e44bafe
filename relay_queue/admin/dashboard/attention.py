"""Notices: what an operator should know first, in whole sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from relay_queue.admin.dashboard.links import Links
from relay_queue.admin.dashboard.panels import is_silent
from relay_queue.quantities import duration, number
from relay_queue.query.status import Overview, QueueStatus, WorkerStatus, serves
from relay_queue.states import State

MOST_NOTICES: Final = 20
"""Notices that are shown; a thousand paused queues are one finding."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence, and the address of the page to act on. ``level`` is error or warning."""

    key: str
    level: str
    text: str
    address: str


def notices(overview: Overview, links: Links) -> list[Notice]:
    """Return the notices, errors before warnings."""
    live = [worker for worker in overview.workers if worker.row.stopped_at is None]
    heard = [worker for worker in live if not is_silent(worker)]
    found = [
        *_nobody_works(overview, heard, links),
        *(notice for queue in overview.queues for notice in _of_queue(queue, heard, links)),
        *(_hindrance(worker, links) for worker in live if worker.row.stop_reason),
        *(_silence(worker, links) for worker in live if is_silent(worker)),
    ]
    found.sort(key=lambda notice: notice.level != "error")
    more = len(found) - MOST_NOTICES
    if more > 0:
        text = ngettext("%(n)s notice more.", "%(n)s notices more.", more) % {"n": number(more)}
        found[MOST_NOTICES:] = [Notice("more", "warning", text, links.queues())]
    return found


def _nobody_works(overview: Overview, heard: list[WorkerStatus], links: Links) -> Iterator[Notice]:
    ready = overview.jobs(State.READY)
    if heard or not overview.queues:
        return
    text = _("No worker is alive. Start one with manage.py runworker.")
    if ready:
        text = ngettext(
            "No worker is alive, and %(n)s job is ready. Start one with manage.py runworker.",
            "No worker is alive, and %(n)s jobs are ready. Start one with manage.py runworker.",
            ready,
        ) % {"n": number(ready)}
    yield Notice("workers", "error" if ready else "warning", text, links.workers())


def _of_queue(queue: QueueStatus, heard: list[WorkerStatus], links: Links) -> Iterator[Notice]:
    address, name = links.queue(queue.name), {"queue": queue.name}
    if queue.capacity is not None and queue.unfinished >= queue.capacity:
        text = _("Queue %(queue)s is full: enqueueing is refused until jobs finish.") % name
        yield Notice(f"full-{queue.name}", "error", text, address)
    if queue.paused_at is not None:
        text = _("Queue %(queue)s is paused: nothing is claimed from it.") % name
        yield Notice(f"paused-{queue.name}", "warning", text, address)
    elif heard and queue.counts.get(State.READY) and not _is_served(queue.name, heard):
        text = _("Jobs are ready in queue %(queue)s, and no worker serves it.") % name
        yield Notice(f"unserved-{queue.name}", "error", text, address)


def _is_served(queue: str, heard: list[WorkerStatus]) -> bool:
    return any(serves(worker.row, queue) for worker in heard)


def _hindrance(worker: WorkerStatus, links: Links) -> Notice:
    text = _("Worker %(worker)s %(reason)s. No job is given up for that; see relay doctor.") % {
        "worker": worker.row,
        "reason": worker.row.stop_reason,
    }
    return Notice(f"hindered-{worker.row.pk}", "error", text, links.worker(worker.row.pk))


def _silence(worker: WorkerStatus, links: Links) -> Notice:
    text = _("Worker %(worker)s has been silent for %(time)s.") % {
        "worker": worker.row,
        "time": duration(worker.heartbeat_age_seconds),
    }
    return Notice(f"silent-{worker.row.pk}", "warning", text, links.worker(worker.row.pk))
