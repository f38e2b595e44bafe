"""``relay drill``: the failure table, executed with real workers and signals."""

from __future__ import annotations

import argparse
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from relay_queue.cli.base import Output, add_json
from relay_queue.cli.output import Styled
from relay_queue.drill import crew
from relay_queue.drill.promises import PROMISES
from relay_queue.drill.result import Result
from relay_queue.scratch import dependent, folder

HELP = (
    "Execute the failure table: real workers are killed, stopped, and kept from their database, "
    "and what came of it is read from the ledger and shown beside what Relay promises. Uses "
    "scratch databases in a temporary folder (TMPDIR names another) and never the project's own. "
    "Takes up to two minutes. Exits with 1 if anything differs."
)

STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    parser.add_argument(
        "--row",
        metavar="ROW",
        action="append",
        type=row_name,
        help="Execute this row only, for example F4. May be repeated.",
    )


def row_name(text: str) -> str:
    """Check the number of a row, for argparse. Raises ``ArgumentTypeError`` with those there are."""
    name = text.upper()
    if name in PROMISES:
        return name
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a row of the failure table. The rows are {', '.join(PROMISES)}."
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Execute the rows, show them, and return 1 if any differs."""
    rows = [row for row in PROMISES if options.row is None or row in options.row]
    began = time.monotonic()
    with dependent.leaving_when_told(*STOPPING), _directory() as directory:
        results = _play(rows, directory, out)
    kept = sum(result.kept for result in results)
    seconds = time.monotonic() - began
    out.data(
        {
            "rows": [result.as_data() for result in results],
            "kept": kept,
            "differ": len(results) - kept,
            "seconds": round(seconds, 1),
        }
    )
    _show(results, out)
    differ = f", {len(results) - kept} differ" if kept < len(results) else ""
    out.line(
        f"{kept} of {len(results)} kept{differ}, in {seconds:.0f} s.", "bad" if differ else "good"
    )
    return 1 if differ else 0


@contextmanager
def _directory() -> Iterator[Path]:
    """Make the folder, and remove it when everything in it has ended."""
    directory = folder.make("relay-drill-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _play(rows: Sequence[str], directory: Path, out: Output) -> list[Result]:
    """Return the results in the order of the table, showing each as it comes."""
    out.line("On scratch databases; the project's own is not touched.", "dim")
    found: dict[str, Result] = {}
    with out.progress("rows", len(rows)) as advance, closing(crew.play(rows, directory)) as playing:
        for result in playing:
            found[result.row] = result
            text = f"{result.row:<3} {PROMISES[result.row].failure}: {result.verdict}"
            out.line(text, "good" if result.kept else "bad")
            advance(1)
    return [found[row] for row in rows]


def _show(results: Sequence[Result], out: Output) -> None:
    out.line()
    columns = ["failure", "promise", "observed", "verdict"]
    out.table(columns, map(_row, results), tall=(2, 3, 4, 0))
    for result in results:
        if result.log:
            out.line()
            out.line(f"{result.row}: the end of its workers' logs", "title")
            for line in result.log:
                out.line(f"  {line}", "dim")
    out.line()


def _row(result: Result) -> list[object]:
    promise = PROMISES[result.row]
    seen: list[object] = [str(o) if o.held else Styled(str(o), "bad") for o in result.observed]
    seen += [Styled(result.fault, "bad")] if result.fault else []
    return [
        f"{result.row} {promise.failure}",
        promise.promise.replace("*", "").replace("`", ""),
        seen,
        Styled(result.verdict, "good" if result.kept else "bad"),
    ]
