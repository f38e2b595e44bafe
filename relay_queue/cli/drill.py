"""``relay drill``: the failure table, executed with real workers and signals."""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from uuid import uuid4

from django.core.management.base import CommandError

from relay_queue import conf
from relay_queue.cli.base import Output, add_json
from relay_queue.cli.output import Style, Styled
from relay_queue.lab.drill import runner
from relay_queue.lab.drill.results import DIFFERS, KEPT, NOT_APPLICABLE, PROMISES, Result
from relay_queue.lab.drill.runner import Site
from relay_queue.lab.processes import STOPPING, leaving_when_told, make_folder
from relay_queue.lab.server import Server

HELP = (
    "Execute the failure table: real workers are killed, stopped, and kept from their database, "
    "and what came of it is read from the ledger and shown beside what Relay promises. Uses "
    "scratch databases and never the project's own: files in a temporary folder (TMPDIR names "
    "another), or, where the queue is on PostgreSQL, databases on that server that are dropped "
    "at the end. Takes up to two minutes. Exits with 1 if anything differs."
)

PREFIX: Final = "relay_drill_"
"""Of the names of scratch databases on a server."""


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
    parser.add_argument(
        "--sqlite",
        action="store_true",
        help="Use files of SQLite even if the queue is on PostgreSQL.",
    )


def row_name(text: str) -> str:
    """Check the number of a row, for argparse. Raises ``ArgumentTypeError`` with all rows."""
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
    server = None if options.sqlite else _server(conf.get().database)
    with leaving_when_told(*STOPPING), _directory() as directory:
        results = _play(rows, Site(directory, server, f"{PREFIX}{uuid4().hex[:8]}"), out)
    verdicts = Counter(result.verdict for result in results)
    seconds = time.monotonic() - began
    out.data(
        {
            "rows": [result.as_data() for result in results],
            "engine": "postgresql" if server else "sqlite",
            "kept": verdicts[KEPT],
            "differ": verdicts[DIFFERS],
            "not_applicable": verdicts[NOT_APPLICABLE],
            "seconds": round(seconds, 1),
        }
    )
    _show(results, out)
    rest = [f", {verdicts[word]} {name}" for word, name in _COUNTED.items() if verdicts[word]]
    text = f"{verdicts[KEPT]} of {len(results)} kept{''.join(rest)}, in {seconds:.0f} s."
    out.line(text, "bad" if verdicts[DIFFERS] else "good")
    return 1 if verdicts[DIFFERS] else 0


_COUNTED: Final = {DIFFERS: "differ", NOT_APPLICABLE: "not applicable"}


def _server(alias: str) -> Server | None:
    """Return the server that holds the queue, None if a file does.

    Raises ``CommandError`` if no database can be made there: the project's own is not for this.
    """
    server = Server.of(alias)
    if server is None:
        return None
    role, may = server.right_to_create()
    if may:
        return server
    raise CommandError(
        f"relay drill makes scratch databases on the server of {alias!r}, and its role {role!r} "
        f'has no right to: it lacks CREATEDB. Run ALTER ROLE "{role}" CREATEDB as an '
        "administrator, or use --sqlite for a drill on scratch files."
    )


@contextmanager
def _directory() -> Iterator[Path]:
    """Make the folder, and remove it when everything in it has ended."""
    directory = make_folder("relay-drill-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _play(rows: Sequence[str], site: Site, out: Output) -> list[Result]:
    """Return the results in the order of the table, showing each as it comes."""
    named = f" {site.prefix}_… on the queue's server" if site.server else ""
    out.line(f"On scratch databases{named}; the project's own is not touched.", "dim")
    found: dict[str, Result] = {}
    with out.progress("rows", len(rows)) as advance, closing(runner.play(rows, site)) as playing:
        for result in playing:
            found[result.row] = result
            text = f"{result.row:<3} {PROMISES[result.row].failure}: {result.verdict}"
            out.line(text, _STYLES[result.verdict])
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
    seen += [Styled(result.reason, "dim")] if result.reason else []
    return [
        f"{result.row} {promise.failure}",
        promise.promise.replace("*", "").replace("`", ""),
        seen,
        Styled(result.verdict, _STYLES[result.verdict]),
    ]


_STYLES: Final[dict[str, Style]] = {KEPT: "good", DIFFERS: "bad", NOT_APPLICABLE: "dim"}
