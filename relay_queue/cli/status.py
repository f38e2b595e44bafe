"""``relay status``: the state of queues and workers."""

from __future__ import annotations

import argparse
import time
from typing import Any

from relay_queue.cli import base
from relay_queue.cli.base import Output, add_json
from relay_queue.cli.output import duration, short
from relay_queue.models import Worker
from relay_queue.query import status
from relay_queue.query.status import (
    QueueStatus,
    Status,
    WorkerStatus,
    busiest,
    excluded_by,
    most_urgent,
    queues_of,
    unserved,
)
from relay_queue.states import State, WorkerOrder
from relay_queue.verdict import Verdict

HELP = (
    "Show the jobs of each queue by state, how long the oldest has waited, the limits, the "
    "workers, the dead letters, the late returns of the last day, and the jobs that ran or may have "
    "run more than once. Reads counters and indexes "
    "only, so it is as fast with a million jobs."
)

# Short, so that seven states fit a terminal of 80 columns.
HEADINGS = {
    State.SCHEDULED: "sched",
    State.READY: "ready",
    State.RUNNING: "run",
    State.RETRYING: "retry",
    State.SUCCEEDED: "done",
    State.DEAD: "dead",
    State.CANCELLED: "cancel",
}

SHORTEST_PAUSE_SECONDS = 0.1
"""The shortest pause of ``--watch``; without one it would only load the database."""

MOST_SHOWN = 50
"""Queues, and workers, in a table; ``--json`` has all."""

MOST_UNSERVED = 20
MOST_SERVED = 2
"""Queues of a worker that are shown by name; ``--json`` has all."""

START_ONE = "Start one with manage.py runworker."

_ORDERED: dict[str, str] = {WorkerOrder.QUIET: "quiet", WorkerOrder.STOP: "stopping"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=_pause,
        help="Show it again every so often, until Ctrl-C.",
    )


def _pause(text: str) -> float:
    seconds = base.duration(text)
    if seconds < SHORTEST_PAUSE_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too often. Write {SHORTEST_PAUSE_SECONDS:g} or more."
        )
    return seconds


def run(options: argparse.Namespace, out: Output) -> int:
    """Show the status once, or again and again."""
    _show(status.read_status(), out)
    while options.watch is not None:
        time.sleep(options.watch)  # the pause that was asked for
        out.line()
        _show(status.read_status(), out)
    return 0


def _show(status: Status, out: Output) -> None:
    out.data(_as_data(status))
    out.line(f"Relay at {status.now:%Y-%m-%d %H:%M:%S} UTC", "title")
    out.line()
    if not status.queues:
        out.line("There is no queue yet; the first enqueue makes one.")
    else:
        _show_queues(status.queues, out)
    _show_unserved(unserved(status.queues, status.workers), out)
    out.line()
    _show_workers(status.workers, out)
    out.line()
    due = status.next_due_at
    out.facts(
        {
            "dead letters": status.dead,
            "next due": due and f"{due:%Y-%m-%d %H:%M:%S} ({_until(due, status)})",
            "late returns in the last day": status.refused_last_day,
            "effect unknown": status.verdicts[Verdict.INTERRUPTED],
            "ran more than once": status.verdicts[Verdict.RAN_AGAIN],
        }
    )


def _show_unserved(names: list[str], out: Output) -> None:
    for name in names[:MOST_UNSERVED]:
        out.line(f"No worker serves queue {short(name)}. {START_ONE}", "warning")
    if len(names) > MOST_UNSERVED:
        more = len(names) - MOST_UNSERVED
        out.line(f"No worker serves {more:,} more queues, either; --json names them.", "warning")


def _until(due: Any, status: Status) -> str:
    seconds = (due - status.now).total_seconds()
    if seconds < 0:
        return f"overdue by {duration(-seconds)}"
    return f"in {duration(seconds)}"


def _show_queues(queues: list[QueueStatus], out: Output) -> None:
    shown = busiest(queues, MOST_SHOWN)
    rows = [
        [short(queue.name), *(queue.counts.get(state, 0) for state in HEADINGS)] for queue in shown
    ]
    if len(queues) > 1:
        sums = [sum(queue.counts.get(state, 0) for queue in queues) for state in HEADINGS]
        rows.append(["(all)", *sums])
    out.table(["queue", *HEADINGS.values()], rows)
    out.line()
    out.table(
        ["queue", "oldest wait", "unfinished", "running", "aging", "claims"],
        [
            [
                short(queue.name),
                duration(queue.oldest_wait_seconds),
                _use(queue.unfinished, queue.capacity),
                _use(queue.counts.get(State.RUNNING, 0), queue.max_running),
                "strict" if queue.aging_seconds is None else f"{queue.aging_seconds:g} s",
                f"paused {queue.paused_at:%m-%d %H:%M}" if queue.paused_at else "open",
            ]
            for queue in shown
        ],
    )
    if len(queues) > len(shown):
        more = len(queues) - len(shown)
        out.line(f"The {len(shown)} queues with the most to do; {more:,} more with --json.")


def _use(used: int, limit: int | None) -> str:
    """Return how much of a limit is used, in numbers and percent."""
    if limit is None:
        return f"{used:,}"
    return f"{used:,} of {limit:,}" + (f" ({used / limit:.0%})" if limit else "")


def _show_workers(workers: list[WorkerStatus], out: Output) -> None:
    if not workers:
        out.line("No worker is running. Start one with manage.py runworker.")
        return
    more = len(workers) - MOST_SHOWN
    workers = most_urgent(workers, MOST_SHOWN)
    out.table(
        ["worker", "host", "pid", "slots", "held", "heartbeat", "state"],
        [
            [
                short(worker.row.name),
                short(worker.row.host),
                str(worker.row.pid),
                worker.row.concurrency,
                worker.open_leases,
                f"{duration(worker.heartbeat_age_seconds)} ago",
                _worker_state(worker),
            ]
            for worker in workers
        ],
    )
    _show_served(workers, out)
    if more > 0:
        out.line(f"Those in trouble first; {more:,} more workers with --json.")


def _show_served(workers: list[WorkerStatus], out: Output) -> None:
    """Show the queues of each worker that has not stopped."""
    live = [worker.row for worker in workers if worker.row.stopped_at is None]
    if live:
        out.line()
        out.table(["worker", "serves"], [[short(row.name), _served(row)] for row in live])


def _served(row: Worker) -> str:
    """Return the queues in a worker's row, as far as a line has room for them."""
    excluded = excluded_by(row)
    names = excluded or queues_of(row)
    shown = ", ".join(map(short, names[:MOST_SERVED])) or "all"
    more = len(names) - MOST_SERVED
    shown = f"{shown} and {more} more" if more > 0 else shown
    return f"all but {shown}" if excluded else shown


def _worker_state(worker: WorkerStatus) -> str:
    if worker.row.stopped_at is None and worker.row.stop_reason:
        return f"hindered: {short(worker.row.stop_reason)}"
    if worker.row.stopped_at is None:
        return _ORDERED.get(worker.row.ordered, "running")
    # Each reason already says that the worker has ended: "stopped by an operator", "died: ...".
    return worker.row.stop_reason or "stopped"


def _as_data(status: Status) -> dict[str, Any]:
    return {
        "now": status.now,
        "queues": [
            {
                "name": queue.name,
                "counts": {state.value: queue.counts.get(state, 0) for state in State},
                "unfinished": queue.unfinished,
                "oldest_wait_seconds": queue.oldest_wait_seconds,
                "capacity": queue.capacity,
                "max_running": queue.max_running,
                "aging_seconds": queue.aging_seconds,
                "paused_at": queue.paused_at,
            }
            for queue in status.queues
        ],
        "workers": [_worker_as_data(worker) for worker in status.workers],
        "dead": status.dead,
        "next_due_at": status.next_due_at,
        "refused_last_day": status.refused_last_day,
        "verdicts": status.verdicts,
        "unserved": unserved(status.queues, status.workers),
    }


def _worker_as_data(worker: WorkerStatus) -> dict[str, Any]:
    names = ("id", "name", "host", "pid", "concurrency", "started_at", "heartbeat_at")
    more = ("stopped_at", "stop_reason", "ordered", "claimed", "succeeded", "failed", "refused")
    return {
        **{name: getattr(worker.row, name) for name in names + more},
        "queues": queues_of(worker.row),
        "exclude_queues": excluded_by(worker.row),
        "open_leases": worker.open_leases,
        "heartbeat_age_seconds": worker.heartbeat_age_seconds,
    }
