"""``relay verify``: check everything that is stored."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from itertools import groupby

from relay_queue import conf
from relay_queue.cli.base import Output, add_json
from relay_queue.query.verify import Verification, verify
from relay_queue.query.verify_rules import Fault
from relay_queue.wakeup.files import database_path

HELP = (
    "Check the write-ahead log, the database file, the checksums of all payloads, the ledger of "
    "attempts and the counters. Reads only, and may run beside live workers. Exits with 1 on any "
    "fault."
)

SHOWN_PER_KIND = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Verify, show each fault with what to do about it, and exit with 1 if there is any."""
    with ExitStack() as stack:
        found = verify(database_path(conf.get().database), progress=_progress(out, stack))
    out.data(_as_data(found))
    for note in found.notes:
        out.line(f"note: {note}", "dim")
    for kind, faults in groupby(sorted(found.faults, key=lambda f: f.kind), lambda f: f.kind):
        _show_kind(kind, list(faults), out)
    if found.ok:
        out.line(f"No fault in {_counted(found.jobs, 'job')}.", "good")
        return 0
    out.line()
    faults_found = _counted(found.fault_count, "fault")
    out.line(f"{faults_found} in {_counted(found.jobs, 'job')}.", "bad")
    return 1


def _counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _progress(out: Output, stack: ExitStack) -> Callable[[str, int, int], None]:
    """Return a callback that shows the progress over the jobs; the bar ends with ``stack``."""
    advance: list[Callable[[int], None]] = []
    shown = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal shown
        if what != "jobs":
            return
        if not advance:
            advance.append(stack.enter_context(out.progress("jobs checked", total)))
        advance[0](done - shown)
        shown = done

    return progress


def _show_kind(kind: str, faults: list[Fault], out: Output) -> None:
    out.line()
    out.line(f"{kind} ({len(faults):,})", "bad")
    for fault in faults[:SHOWN_PER_KIND]:
        out.line(f"  {fault.message}")
    if len(faults) > SHOWN_PER_KIND:
        out.line(f"  and {len(faults) - SHOWN_PER_KIND:,} more; --json lists them")
    out.line(f"  What to do: {faults[0].advice}")


def _as_data(found: Verification) -> dict[str, object]:
    return {
        "ok": found.ok,
        "jobs": found.jobs,
        "fault_count": found.fault_count,
        "faults": [asdict(fault) | {"advice": fault.advice} for fault in found.faults],
        "notes": found.notes,
        "log": found.log and asdict(found.log),
    }
