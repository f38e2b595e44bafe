"""Panels: the rows of the dashboard's tables, and its tiles, made from an overview.

A tile is one figure on top of the page, with its meaning and its link.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from relay_queue.admin.dashboard.links import Links, counted, linked
from relay_queue.admin.formatting import (
    BROKEN,
    CHECK,
    CROSS,
    ICONS,
    LOOP,
    PAUSE,
    PLAY,
    SLASHED,
    WARNING,
    age,
    badge,
    icon,
    moment,
)
from relay_queue.models import Worker
from relay_queue.quantities import duration, number, percent, whole_seconds
from relay_queue.query.history import Histogram, Tally, total
from relay_queue.query.status import (
    DAY,
    LOOKED_AT_FOR_OLDEST,
    MOST_INTERRUPTED,
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


def percentiles(histogram: Histogram) -> list[tuple[str, str]]:
    """Return the names and values of the percentiles p50, p95 and p99."""
    return [(f"p{n}", duration(histogram.percentile(n / 100))) for n in PERCENTILES]


def live_workers(overview: Overview) -> list[WorkerStatus]:
    """Return the workers that have not stopped."""
    return [worker for worker in overview.workers if worker.row.stopped_at is None]


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


def place(row: Worker) -> str:
    """Return the host and the process id of a worker."""
    return _("%(host)s, pid %(pid)s") % {"host": row.host, "pid": row.pid}


def _queue_row(queue: QueueStatus, done: Tally, largest: int, links: Links) -> dict[str, Any]:
    return {
        "key": queue.name,
        "name": linked(queue.name, links.queue(queue.name)),
        "badge": badge("paused", _("Paused"), PAUSE) if queue.paused_at else "",
        "pieces": pieces(queue, largest),
        "counts": [
            counted(queue.counts.get(state, 0), links.jobs(state, queue.name)) for state in LISTED
        ],
        "oldest_wait": duration(queue.oldest_wait_seconds),
        "is_bound": queue.counts.get(State.READY, 0) > LOOKED_AT_FOR_OLDEST,
        "capacity": capacity_meter(queue.unfinished, queue.capacity),
        "running": running_meter(queue.counts.get(State.RUNNING, 0), queue.max_running),
        "succeeded": number(done.succeeded),
        "failure_rate": percent(done.failure_rate),
        "has_failed": done.failed > 0,
    }


def _served(row: Worker) -> str:
    excluded = ", ".join(excluded_by(row))
    if excluded:
        return _("all but %(queues)s") % {"queues": excluded}
    return ", ".join(queues_of(row)) or _("all")


def worker_row(worker: WorkerStatus, links: Links) -> dict[str, Any]:
    """Return what the table shows of one worker."""
    row = worker.row
    return {
        "key": row.pk,
        "name": linked(row.name, links.worker(row.pk)),
        "place": place(row),
        "queues": _served(row),
        "badge": worker_badge(row, worker.heartbeat_age_seconds),
        "slots": slots_meter(worker.open_leases, row.concurrency, links.held_by(row.pk)),
        "succeeded": number(row.succeeded),
        "failed": number(row.failed),
        "heartbeat": moment(row.heartbeat_at, age(worker.heartbeat_age_seconds)),
        "started": moment(row.started_at, _up_for(worker)),
    }


def _up_for(worker: WorkerStatus) -> str:
    row = worker.row
    until = row.stopped_at or row.heartbeat_at + timedelta(seconds=worker.heartbeat_age_seconds)
    return duration(whole_seconds(max(0.0, (until - row.started_at).total_seconds())))


def slots_meter(used: int, concurrency: int, address: str = "") -> Meter:
    """Return how many slots of a worker are in use."""
    return _meter(_used(used, concurrency), used, concurrency, address=address)


def capacity_meter(used: int, limit: int | None) -> Meter | None:
    """Return how much of its capacity a queue uses; None if it has none."""
    if limit is None:
        return None
    share = used / limit if limit else 1.0
    kind = "full" if share >= 1 else "nearly" if share >= 0.8 else "used"
    return _meter(_used(used, limit), used, limit, kind=kind)


def running_meter(used: int, limit: int | None) -> Meter | None:
    """Return how many jobs run of those that may; None without such a limit."""
    if limit is None:
        return None
    return _meter(_("%(used)s running") % {"used": _used(used, limit)}, used, limit)


def _used(used: int, limit: int) -> str:
    said = {"used": number(used), "limit": number(limit)}
    return ngettext("%(used)s of %(limit)s", "%(used)s of %(limit)s", limit) % said


def _meter(text: str, used: int, limit: int, *, kind: str = "used", address: str = "") -> Meter:
    share = min(used / limit, 1.0) if limit else 1.0
    filled = [Piece(kind, "0", f"{share * 100:.1f}")] if share else []
    return Meter(linked(text, address), filled)


def pieces(queue: QueueStatus, largest: int) -> list[Piece]:
    """Lay the states of a queue side by side; a queue with the ``largest`` number fills the bar."""
    found, x = [], 0.0
    for state in STACKED:
        if n := queue.counts.get(state, 0):
            width = max(n / largest * 100, 1.0)  # few jobs can be seen beside many
            found.append(Piece(state.value, f"{x:.2f}", f"{min(width, 100 - x):.2f}"))
            x += width
    return found


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure: its name, its value, and a line below."""

    key: str
    label: str
    icon: SafeString
    value: SafeString
    below: str | SafeString
    is_alarming: bool = False


def tiles_now(overview: Overview, links: Links) -> list[Tile]:
    """Return the figures of this moment."""
    dead, died = overview.jobs(State.DEAD), number(total(overview.day).died)
    figure = _figure(dead, links.jobs(State.DEAD))
    below = _("%(n)s in 24 h") % {"n": died}
    return [
        _tile(overview, links, State.READY, _oldest_wait(overview)),
        _tile(overview, links, State.RUNNING, _slots(overview)),
        _tile(overview, links, State.RETRYING, _due(overview, State.RETRYING)),
        _tile(overview, links, State.SCHEDULED, _due(overview, State.SCHEDULED)),
        Tile("dead", _("Dead letters"), icon(CROSS), figure, below, is_alarming=dead > 0),
    ]


def tiles_lately(overview: Overview, links: Links) -> list[Tile]:
    """Return the figures of the last hour and day."""
    hour, day = total(overview.hour.spans), total(overview.day)
    since_hour, since_day = overview.hour.spans[0].start, overview.now - DAY
    done = _figure(hour.succeeded, links.jobs(State.SUCCEEDED, finished_at=since_hour))
    of_day = _("in 1 h; %(day)s in 24 h") % {"day": number(day.succeeded)}
    rate = linked(percent(hour.failure_rate), links.failed(since_hour) if hour.failed else "")
    rate_of_day = _("in 1 h; %(rate)s in 24 h") % {"rate": percent(day.failure_rate)}
    late = _figure(overview.refused_last_day, links.refused(since_day))
    n = overview.interrupted_last_day
    cut_short = _figure(n, links.interrupted(since_day), n >= MOST_INTERRUPTED)
    return [
        Tile("throughput", _("Succeeded"), icon(CHECK), done, of_day),
        Tile("failures", _("Failure rate"), icon(WARNING), rate, rate_of_day),
        _workers(overview, links),
        Tile("refused", _("Refused acks"), icon(BROKEN), late, _("in 24 h, came too late")),
        Tile(
            "interrupted", _("May run twice"), icon(LOOP), cut_short, _("in 24 h, were cut short")
        ),
    ]


def _tile(overview: Overview, links: Links, state: State, below: str | SafeString) -> Tile:
    figure = _figure(overview.jobs(state), links.jobs(state))
    return Tile(state.value, str(state.label), icon(ICONS[state]), figure, below)


def _workers(overview: Overview, links: Links) -> Tile:
    live = live_workers(overview)
    silent = sum(is_silent(worker) for worker in live)
    youngest = min((worker.heartbeat_age_seconds for worker in live), default=None)
    if silent:
        below = ngettext("%(n)s is silent", "%(n)s are silent", silent) % {"n": number(silent)}
    elif youngest is None:
        below = _("none has reported")
    else:
        below = _("heard of %(ago)s") % {"ago": age(youngest)}
    alarms = silent > 0 or not live
    figure = _figure(len(live) - silent, links.workers())
    return Tile("workers", _("Workers alive"), icon(PLAY), figure, below, is_alarming=alarms)


def _figure(n: int, address: str, is_bound: bool = False) -> SafeString:
    text = f"{number(n)}+" if is_bound else number(n)
    return linked(text, address if n else "")


def _oldest_wait(overview: Overview) -> str:
    waits = [queue.oldest_wait_seconds for queue in overview.queues]
    longest = max((wait for wait in waits if wait is not None), default=None)
    if longest is None:
        return _("nothing waits")
    return _("oldest waits %(time)s") % {"time": duration(longest)}


def _slots(overview: Overview) -> str:
    slots = sum(worker.row.concurrency for worker in live_workers(overview))
    return ngettext("of %(n)s slot", "of %(n)s slots", slots) % {"n": number(slots)}


def _due(overview: Overview, state: State) -> str | SafeString:
    due = overview.next_due.get(state)
    if due is not None:
        return moment(due, _in(due, overview.now))
    return _("next is due later") if overview.jobs(state) else _("none")


def _in(due: datetime, now: datetime) -> str:
    seconds = (due - now).total_seconds()
    if seconds <= 0:
        return _("next is due now")
    return _("next in %(time)s") % {"time": duration(whole_seconds(max(1.0, seconds)))}
