"""Panels: the rows of the dashboard's tables, made from an overview."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from relay_queue.admin.dashboard.links import Links, counted, linked
from relay_queue.admin.formatting import BROKEN, PAUSE, PLAY, SLASHED, age, badge, moment
from relay_queue.models import Worker
from relay_queue.quantities import duration, number, percent, whole_seconds
from relay_queue.query.history import Histogram, Tally
from relay_queue.query.status import (
    LOOKED_AT_FOR_OLDEST,
    SILENT_SECONDS,
    Overview,
    QueueStatus,
    WorkerStatus,
    busiest,
    excluded_by,
    queues_of,
)
from relay_queue.states import State, WorkerOrder

STACKED: Final = (State.RUNNING, State.READY, State.RETRYING, State.SCHEDULED)
"""The states in a queue's bar, from the left: what runs, what can run, what runs later."""

MOST_QUEUES: Final = 50
MOST_WORKERS: Final = 50
"""Rows of the tables of queues and workers. With thousands of rows a refresh would be megabytes, for each open tab."""

PERCENTILES: Final = (50, 95, 99)

LISTED: Final = (*STACKED, State.DEAD)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a horizontal bar, in hundredths of its length."""

    kind: str
    x: str
    width: str


@dataclass(frozen=True, slots=True)
class Meter:
    """The used part of a limit: a bar, and the same as text."""

    text: SafeString
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One queue of the table, or the sum of all."""

    key: str
    name: str | SafeString
    badge: str | SafeString
    pieces: list[Piece]
    counts: list[SafeString]
    oldest_wait: str
    is_bound: bool
    capacity: Meter | None
    running: Meter | None
    succeeded: str
    failure_rate: str
    has_failed: bool


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker of the table."""

    key: int
    name: SafeString
    place: str
    queues: str
    badge: SafeString
    slots: Meter
    succeeded: str
    failed: str
    heartbeat: SafeString
    started: SafeString


def queues(overview: Overview, links: Links) -> dict[str, object]:
    """Return a row for each queue, by name, and how many are left out.

    Of more than ``MOST_QUEUES`` those are shown that have the most jobs to do, or dead letters.
    """
    done = overview.hour.queues
    shown = busiest(overview.queues, MOST_QUEUES)
    largest = max((queue.unfinished for queue in shown), default=0)
    more = len(overview.queues) - len(shown)
    return {
        "queues": [
            _queue_row(queue, done.get(queue.name, Tally()), largest, links) for queue in shown
        ],
        "more_queues": number(more) if more else "",
        "all_queues": links.queues(),
    }


def totals(overview: Overview, links: Links) -> list[SafeString]:
    """Return the jobs of all queues by state, in the order of the columns."""
    return [counted(overview.jobs(state), links.jobs(state)) for state in LISTED]


def worker_rows(workers: Iterable[WorkerStatus], links: Links) -> list[WorkerRow]:
    """Return a row for each worker."""
    return [_worker_row(worker, links) for worker in workers]


def percentiles(histogram: Histogram) -> list[tuple[str, str]]:
    """Return the names and values of the percentiles p50, p95 and p99."""
    return [(f"p{n}", duration(histogram.percentile(n / 100))) for n in PERCENTILES]


def is_silent(worker: WorkerStatus) -> bool:
    """Say whether a worker that has not stopped wrote no heartbeat for ``SILENT_SECONDS``."""
    return _is_silent(worker.row, worker.heartbeat_age_seconds)


def worker_badge(row: Worker, heartbeat_age_seconds: float) -> SafeString:
    """Return the badge of a worker's state, by its row and the age of its last heartbeat."""
    if row.stopped_at is not None:
        return badge("cancelled", _("Stopped"), SLASHED)
    if _is_silent(row, heartbeat_age_seconds):
        return badge("lost", _("Silent"), BROKEN)
    if row.ordered == WorkerOrder.STOP:
        return badge("paused", _("Stopping"), SLASHED)
    if row.ordered == WorkerOrder.QUIET:
        return badge("paused", _("Quiet"), PAUSE)
    return badge("running", _("Alive"), PLAY)


def _is_silent(row: Worker, heartbeat_age_seconds: float) -> bool:
    return row.stopped_at is None and heartbeat_age_seconds > SILENT_SECONDS


def _queue_row(queue: QueueStatus, done: Tally, largest: int, links: Links) -> QueueRow:
    counts = [(state, queue.counts.get(state, 0)) for state in STACKED]
    return QueueRow(
        key=queue.name,
        name=linked(queue.name, links.queue(queue.name)),
        badge=badge("paused", _("Paused"), PAUSE) if queue.paused_at else "",
        pieces=_pieces(counts, largest),
        counts=[
            counted(queue.counts.get(state, 0), links.jobs(state, queue.name)) for state in LISTED
        ],
        oldest_wait=duration(queue.oldest_wait_seconds),
        is_bound=queue.counts.get(State.READY, 0) > LOOKED_AT_FOR_OLDEST,
        capacity=capacity_meter(queue.unfinished, queue.capacity),
        running=running_meter(queue.counts.get(State.RUNNING, 0), queue.max_running),
        succeeded=number(done.succeeded),
        failure_rate=percent(done.failure_rate),
        has_failed=done.failed > 0,
    )


def _served(row: Worker) -> str:
    excluded = ", ".join(excluded_by(row))
    if excluded:
        return _("all but %(queues)s") % {"queues": excluded}
    return ", ".join(queues_of(row)) or _("all")


def _worker_row(worker: WorkerStatus, links: Links) -> WorkerRow:
    row = worker.row
    held = linked(_used(worker.open_leases, row.concurrency), links.held_by(row.pk))
    return WorkerRow(
        key=row.pk,
        name=linked(row.name, links.worker(row.pk)),
        place=_("%(host)s, pid %(pid)s") % {"host": row.host, "pid": row.pid},
        queues=_served(row),
        badge=worker_badge(row, worker.heartbeat_age_seconds),
        slots=Meter(held, _filled(worker.open_leases, row.concurrency)),
        succeeded=number(row.succeeded),
        failed=number(row.failed),
        heartbeat=moment(row.heartbeat_at, age(worker.heartbeat_age_seconds)),
        started=moment(row.started_at, _up_for(worker)),
    )


def _up_for(worker: WorkerStatus) -> str:
    row = worker.row
    until = row.stopped_at or row.heartbeat_at + timedelta(seconds=worker.heartbeat_age_seconds)
    return duration(whole_seconds(max(0.0, (until - row.started_at).total_seconds())))


def slots_meter(used: int, concurrency: int) -> Meter:
    """Return how many slots of a worker are in use."""
    return Meter(linked(_used(used, concurrency), ""), _filled(used, concurrency))


def pieces(queue: QueueStatus) -> list[Piece]:
    """Return the bar of one queue's unfinished jobs."""
    counts = [(state, queue.counts.get(state, 0)) for state in STACKED]
    return _pieces(counts, queue.unfinished)


def capacity_meter(used: int, limit: int | None) -> Meter | None:
    """Return how much of its capacity a queue uses; None if it has none."""
    if limit is None:
        return None
    share = used / limit if limit else 1.0
    kind = "full" if share >= 1 else "nearly" if share >= 0.8 else "used"
    return Meter(linked(_used(used, limit), ""), _filled(used, limit, kind))


def running_meter(used: int, limit: int | None) -> Meter | None:
    """Return how many jobs run of those that may; None without such a limit."""
    if limit is None:
        return None
    text = _("%(used)s running") % {"used": _used(used, limit)}
    return Meter(linked(text, ""), _filled(used, limit))


def _used(used: int, limit: int) -> str:
    return ngettext("%(used)s of %(limit)s", "%(used)s of %(limit)s", limit) % {
        "used": number(used),
        "limit": number(limit),
    }


def _filled(used: int, limit: int, kind: str = "used") -> list[Piece]:
    share = min(used / limit, 1.0) if limit else 1.0
    return [Piece(kind, "0", f"{share * 100:.1f}")] if share else []


def _pieces(counts: list[tuple[State, int]], largest: int) -> list[Piece]:
    """Lay the states of a queue side by side; the queue with the most jobs fills the bar."""
    pieces, x = [], 0.0
    for state, n in counts:
        width = n / largest * 100 if largest else 0.0
        if n:
            width = max(width, 1.0)  # few jobs can be seen beside many
            pieces.append(Piece(state.value, f"{x:.2f}", f"{min(width, 100 - x):.2f}"))
            x += width
    return pieces
