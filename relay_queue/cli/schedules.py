"""``relay schedules``: list them, sync them with the code, pause, resume, and run one now."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

from django.core.management.base import CommandError

from relay_queue import schedules
from relay_queue.cli.base import Verb, whole_number
from relay_queue.cli.output import Output
from relay_queue.query import runs

DEFAULT_COUNT: Final = 10


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        metavar="ACTION",
        choices=_ACTIONS,
        help=f"What to do: {', '.join(_ACTIONS)}; list by default.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="Name of the schedule.")
    parser.add_argument(
        "--count",
        metavar="N",
        type=whole_number,
        default=DEFAULT_COUNT,
        help=f"How many of the next slots to show; {DEFAULT_COUNT} by default.",
    )


def _schedules(options: argparse.Namespace, out: Output) -> None:
    """List the schedules with their next slots and what became of the last ones; make them what the
    code declares (sync), as migrate does; pause one or resume it; run one now, beside its slots; or
    show its next slots (next).
    """
    act, needs_name = _ACTIONS[options.action]
    if needs_name != (options.name is not None):
        asks = "needs the name of a schedule" if needs_name else "takes no name"
        raise CommandError(f"relay schedules {options.action} {asks}.")
    act(options, out)


def _list(options: argparse.Namespace, out: Output) -> None:
    found = runs.schedules()
    out.data(schedules=[_as_data(each) for each in found])
    if not found:
        out.line("There is no schedule. The code declares them; see relay_queue.schedules.")
        return
    columns = ("schedule", "when", "task", "next (UTC)", "last slot (UTC)", "outcome")
    out.table(columns, [_as_row(each) for each in found])


def _as_data(each: runs.ScheduleStatus) -> dict[str, Any]:
    return {
        "name": each.name,
        "when": each.when,
        "task": each.columns["task"],
        "queue": each.columns["queue"],
        "source": each.source,
        "next_at": each.next_at,
        "stands_still": each.stands_still,
        "last_slot_at": each.last_slot_at,
        "last_outcome": each.last_outcome,
        "last_job_id": each.last_job_id,
    }


def _as_row(each: runs.ScheduleStatus) -> list[object]:
    outcome = each.last_outcome or None
    if each.last_job_id is not None and outcome == "enqueued":
        outcome = f"job {each.last_job_id}"
    return [
        each.name,
        each.when,
        each.columns["task"],
        each.stands_still or _moment(each.next_at),
        _moment(each.last_slot_at),
        outcome,
    ]


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def _sync(options: argparse.Namespace, out: Output) -> None:
    done = schedules.sync()
    out.data(added=done.added, changed=done.changed, retired=done.retired)
    parts = (("Added", done.added), ("Changed", done.changed), ("Retired", done.retired))
    lines = [f"{word}: {', '.join(names)}." for word, names in parts if names]
    for line in lines or ["The schedules are what the code declares."]:
        out.line(line)


def _switch(change: Callable[[str], bool], done: str, already: str) -> Callable[..., None]:
    def act(options: argparse.Namespace, out: Output) -> None:
        changed = change(options.name)
        out.data(schedule=options.name, changed=changed)
        out.line((done if changed else already).format(name=options.name))

    return act


def _run(options: argparse.Namespace, out: Output) -> None:
    job_id = schedules.run(options.name)
    out.data(schedule=options.name, job_id=job_id)
    out.line(f"Job {job_id} is ready. The slots of {options.name} go on as they were.")


def _next(options: argparse.Namespace, out: Output) -> None:
    if options.count < 1:
        raise CommandError(f"--count is {options.count}; it must be at least 1.")
    slots = schedules.next_runs(options.name, options.count)
    found = runs.schedule(options.name)
    out.data(schedule=options.name, slots=slots)
    if not slots and found is not None:
        out.line(f"{options.name} stands still: {found.stands_still}.", "warning")
    zone = ZoneInfo(found.columns["zone"]) if found and found.columns["zone"] else None
    for slot in slots:
        local = "" if zone is None else f"  {slot.astimezone(zone):%a %Y-%m-%d %H:%M:%S %Z}"
        out.line(f"{slot:%Y-%m-%d %H:%M:%S} UTC{local}")


_ACTIONS: Final[dict[str, tuple[Callable[..., None], bool]]] = {
    "list": (_list, False),
    "sync": (_sync, False),
    "pause": (
        _switch(schedules.pause, "{name} stands still.", "{name} is paused already."),
        True,
    ),
    "resume": (_switch(schedules.resume, "{name} goes on.", "{name} is not paused."), True),
    "run": (_run, True),
    "next": (_next, True),
}
"""What each action does, and whether it needs a name."""

VERBS: Final = {"schedules": Verb(_schedules, _declare)}
