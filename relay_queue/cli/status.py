"""``relay status``: the state of queues and workers."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from relay_queue.cli.base import Verb, duration_argument
from relay_queue.cli.output import Output, duration, short
from relay_queue.models import Worker
from relay_queue.query import status
from relay_queue.query.status import QueueStatus, Status, WorkerStatus
from relay_queue.states import State, WorkerOrder
from relay_queue.verdict import Verdict

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


def _add_watch(parser: argparse.ArgumentParser) -> None:
    text = "Show it again every so often, until Ctrl-C."
    parser.add_argument("--watch", metavar="SECONDS", type=_pause, help=text)


def _pause(text: str) -> float:
    seconds = duration_argument(text)
    if seconds < SHORTEST_PAUSE_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too often. Write {SHORTEST_PAUSE_SECONDS:g} or more."
        )
    return seconds


def _status(options: argparse.Namespace, out: Output) -> None:
    """Show the jobs of each queue by state, how long the oldest has waited, the limits, the
    workers, the dead letters, the late returns of the last day, and the jobs that ran or may have
    run more than once. Reads counters and indexes only, so it is as fast with a million jobs.
    """
    _show(status.read_status(), out)
    while options.watch is not None:
        time.sleep(options.watch)  # the pause that was asked for
        out.line()
        _show(status.read_status(), out)


def _show(found: Status, out: Output) -> None:
    unserved = status.unserved(found.queues, found.workers)
    out.data(**_as_data(found, unserved))
    out.line(f"Relay at {found.now:%Y-%m-%d %H:%M:%S} UTC", "title")
    out.line()
    if not found.queues:
        out.line("There is no queue yet; the first enqueue makes one.")
    else:
        _show_queues(found.queues, out)
    _show_unserved(unserved, out)
    out.line()
    _show_workers(found.workers, out)
    out.line()
    due = found.next_due_at
    out.facts(
        {
            "dead letters": found.dead,
            "next due": due and f"{due:%Y-%m-%d %H:%M:%S} ({_until(due, found)})",
            "late returns in the last day": found.refused_last_day,
            "effect unknown": found.verdicts[Verdict.INTERRUPTED],
            "ran more than once": found.verdicts[Verdict.RAN_AGAIN],
        }
    )


def _show_unserved(names: list[str], out: Output) -> None:
    for name in names[:MOST_UNSERVED]:
        out.line(f"No worker serves queue {short(name)}. {START_ONE}", "warning")
    if len(names) > MOST_UNSERVED:
        more = len(names) - MOST_UNSERVED
        out.line(f"No worker serves {more:,} more queues, either; --json names them.", "warning")


def _until(due: datetime, found: Status) -> str:
    seconds = (due - found.now).total_seconds()
    return f"overdue by {duration(-seconds)}" if seconds < 0 else f"in {duration(seconds)}"


def _show_queues(queues: list[QueueStatus], out: Output) -> None:
    listed = status.busiest(queues, MOST_SHOWN)
    rows = [[short(queue.name), *map(_counts(queue).get, HEADINGS)] for queue in listed]
    if len(queues) > 1:
        sums = [sum(queue.counts.get(state, 0) for queue in queues) for state in HEADINGS]
        rows.append(["(all)", *sums])
    out.table(["queue", *HEADINGS.values()], rows)
    out.line()
    columns = ["queue", "oldest wait", "unfinished", "running", "aging", "claims"]
    out.table(columns, map(_limits_row, listed))
    if len(queues) > len(listed):
        more = len(queues) - len(listed)
        out.line(f"The {len(listed)} queues with the most to do; {more:,} more with --json.")


def _counts(queue: QueueStatus) -> dict[str, int]:
    """Return how many jobs a queue has in each state."""
    return {state.value: queue.counts.get(state, 0) for state in State}


def _limits_row(queue: QueueStatus) -> list[object]:
    return [
        short(queue.name),
        duration(queue.oldest_wait_seconds),
        _use(queue.unfinished, queue.capacity),
        _use(queue.counts.get(State.RUNNING, 0), queue.max_running),
        "strict" if queue.aging_seconds is None else f"{queue.aging_seconds:g} s",
        f"paused {queue.paused_at:%m-%d %H:%M}" if queue.paused_at else "open",
    ]


def _use(used: int, limit: int | None) -> str:
    """Return how much of a limit is used, in numbers and percent."""
    if limit is None:
        return f"{used:,}"
    return f"{used:,} of {limit:,}" + (f" ({used / limit:.0%})" if limit else "")


def _show_workers(workers: list[WorkerStatus], out: Output) -> None:
    if not workers:
        out.line(f"No worker is running. {START_ONE}")
        return
    listed = status.most_urgent(workers, MOST_SHOWN)
    columns = ["worker", "host", "pid", "slots", "held", "heartbeat", "state"]
    out.table(columns, map(_worker_row, listed))
    _show_served(listed, out)
    if len(workers) > len(listed):
        more = len(workers) - len(listed)
        out.line(f"Those in trouble first; {more:,} more workers with --json.")


def _worker_row(worker: WorkerStatus) -> list[object]:
    row = worker.row
    return [
        short(row.name),
        short(row.host),
        str(row.pid),
        row.concurrency,
        worker.open_leases,
        f"{duration(worker.heartbeat_age_seconds)} ago",
        _worker_state(row),
    ]


def _show_served(workers: list[WorkerStatus], out: Output) -> None:
    """Show the queues of each worker that has not stopped."""
    live = [worker.row for worker in workers if worker.row.stopped_at is None]
    if live:
        out.line()
        out.table(["worker", "serves"], [[short(row.name), _served(row)] for row in live])


def _served(row: Worker) -> str:
    """Return the queues in a worker's row, as far as a line has room for them."""
    excluded = status.excluded_by(row)
    names = excluded or status.queues_of(row)
    listed = ", ".join(map(short, names[:MOST_SERVED])) or "all"
    more = len(names) - MOST_SERVED
    listed = f"{listed} and {more} more" if more > 0 else listed
    return f"all but {listed}" if excluded else listed


def _worker_state(row: Worker) -> str:
    if row.stopped_at is not None:
        # Each reason already says that the worker has ended: "stopped by an operator", "died: ...".
        return row.stop_reason or "stopped"
    if row.stop_reason:
        return f"hindered: {short(row.stop_reason)}"
    return _ORDERED.get(row.ordered, "running")


def _as_data(found: Status, unserved: list[str]) -> dict[str, Any]:
    return {
        "now": found.now,
        "queues": [
            asdict(queue) | {"counts": _counts(queue), "unfinished": queue.unfinished}
            for queue in found.queues
        ],
        "workers": [_worker_as_data(worker) for worker in found.workers],
        "dead": found.dead,
        "next_due_at": found.next_due_at,
        "refused_last_day": found.refused_last_day,
        "verdicts": found.verdicts,
        "unserved": unserved,
    }


def _worker_as_data(worker: WorkerStatus) -> dict[str, Any]:
    names = ("id", "name", "host", "pid", "concurrency", "started_at", "heartbeat_at")
    more = ("stopped_at", "stop_reason", "ordered", "claimed", "succeeded", "failed", "refused")
    return {
        **{name: getattr(worker.row, name) for name in names + more},
        "queues": status.queues_of(worker.row),
        "exclude_queues": status.excluded_by(worker.row),
        "open_leases": worker.open_leases,
        "heartbeat_age_seconds": worker.heartbeat_age_seconds,
    }


VERBS: Final = {"status": Verb(_status, _add_watch)}
"""The verb by its name."""
