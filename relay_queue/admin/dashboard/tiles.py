"""Tiles: the figures on top of the dashboard, each with its meaning and its link."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from relay_queue.admin.dashboard.links import Links, linked
from relay_queue.admin.dashboard.panels import is_silent
from relay_queue.admin.formatting import (
    BROKEN,
    CHECK,
    CROSS,
    ICONS,
    LOOP,
    PLAY,
    WARNING,
    age,
    icon,
    moment,
)
from relay_queue.quantities import duration, number, percent, whole_seconds
from relay_queue.query.history import total
from relay_queue.query.status import DAY, MOST_INTERRUPTED, Overview
from relay_queue.states import State


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure: its name, its value, and a line below."""

    key: str
    label: str
    icon: SafeString
    value: SafeString
    below: str | SafeString
    is_alarming: bool = False


def now(overview: Overview, links: Links) -> list[Tile]:
    """Return the figures of this moment."""
    dead = overview.jobs(State.DEAD)
    return [
        _tile(overview, links, State.READY, _oldest_wait(overview)),
        _tile(overview, links, State.RUNNING, _slots(overview)),
        _tile(overview, links, State.RETRYING, _due(overview, State.RETRYING)),
        _tile(overview, links, State.SCHEDULED, _due(overview, State.SCHEDULED)),
        Tile(
            key="dead",
            label=_("Dead letters"),
            icon=icon(CROSS),
            value=linked(number(dead), links.jobs(State.DEAD) if dead else ""),
            below=_("%(n)s in 24 h") % {"n": number(total(overview.day).died)},
            is_alarming=dead > 0,
        ),
    ]


def lately(overview: Overview, links: Links) -> list[Tile]:
    """Return the figures of the last hour and day."""
    hour, day = total(overview.hour.spans), total(overview.day)
    since_hour, since_day = overview.hour.spans[0].start, overview.now - DAY
    refused, cut_short = overview.refused_last_day, overview.interrupted_last_day
    return [
        Tile(
            key="throughput",
            label=_("Succeeded"),
            icon=icon(CHECK),
            value=_linked(hour.succeeded, links.jobs(State.SUCCEEDED, finished_at=since_hour)),
            below=_("in 1 h; %(day)s in 24 h") % {"day": number(day.succeeded)},
        ),
        Tile(
            key="failures",
            label=_("Failure rate"),
            icon=icon(WARNING),
            value=linked(
                percent(hour.failure_rate),
                links.failed(since_hour) if hour.failed else "",
            ),
            below=_("in 1 h; %(rate)s in 24 h") % {"rate": percent(day.failure_rate)},
        ),
        _workers(overview, links),
        Tile(
            key="refused",
            label=_("Refused acks"),
            icon=icon(BROKEN),
            value=_linked(refused, links.refused(since_day)),
            below=_("in 24 h, came too late"),
        ),
        Tile(
            key="interrupted",
            label=_("May run twice"),
            icon=icon(LOOP),
            value=_linked(cut_short, links.interrupted(since_day), cut_short >= MOST_INTERRUPTED),
            below=_("in 24 h, were cut short"),
        ),
    ]


def _tile(overview: Overview, links: Links, state: State, below: str | SafeString) -> Tile:
    n = overview.jobs(state)
    return Tile(
        key=state.value,
        label=str(state.label),
        icon=icon(ICONS[state]),
        value=_linked(n, links.jobs(state)),
        below=below,
    )


def _workers(overview: Overview, links: Links) -> Tile:
    live = [worker for worker in overview.workers if worker.row.stopped_at is None]
    silent = sum(is_silent(worker) for worker in live)
    youngest = min((worker.heartbeat_age_seconds for worker in live), default=None)
    if silent:
        below = ngettext("%(n)s is silent", "%(n)s are silent", silent) % {"n": number(silent)}
    elif youngest is None:
        below = _("none has reported")
    else:
        below = _("heard of %(ago)s") % {"ago": age(youngest)}
    return Tile(
        key="workers",
        label=_("Workers alive"),
        icon=icon(PLAY),
        value=_linked(len(live) - silent, links.workers()),
        below=below,
        is_alarming=silent > 0 or not live,
    )


def _linked(n: int, address: str, is_bound: bool = False) -> SafeString:
    text = f"{number(n)}+" if is_bound else number(n)
    return linked(text, address if n else "")


def _oldest_wait(overview: Overview) -> str:
    waits = [queue.oldest_wait_seconds for queue in overview.queues]
    longest = max((wait for wait in waits if wait is not None), default=None)
    if longest is None:
        return _("nothing waits")
    return _("oldest waits %(time)s") % {"time": duration(longest)}


def _slots(overview: Overview) -> str:
    live = [worker for worker in overview.workers if worker.row.stopped_at is None]
    slots = sum(worker.row.concurrency for worker in live)
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
