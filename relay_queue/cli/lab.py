"""The verbs of the laboratory: ``relay demo``, ``relay drill`` and ``relay bench``.

They work on scratch databases and never on the project's own.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from django.core.management.base import CommandError
from django.db import connections

from relay_queue import conf
from relay_queue.cli.base import INTERRUPTED, Verb, flag, known_name
from relay_queue.cli.output import Output, Style, Styled
from relay_queue.lab.bench import runner as benches
from relay_queue.lab.bench.figures import SPECS, names_for
from relay_queue.lab.drill import runner as drills
from relay_queue.lab.drill.results import DIFFERS, KEPT, NOT_APPLICABLE, PROMISES, Result
from relay_queue.lab.processes import STOPPING, leaving_when_told, make_folder, started
from relay_queue.lab.project import SETTINGS, variables
from relay_queue.lab.server import Server
from relay_queue.lab.settings import DIRECTORY_VARIABLE

PREFIX: Final = "relay_drill_"
"""Of the names of scratch databases on a server."""

_STYLES: Final[dict[str, Style]] = {KEPT: "good", DIFFERS: "bad", NOT_APPLICABLE: "dim"}


@contextmanager
def _scratch_folder(prefix: str, *, keep: bool = False) -> Iterator[Path]:
    """Make a folder, and remove it when everything in it has ended, also if a signal ends it."""
    with leaving_when_told(*STOPPING):
        folder = make_folder(prefix)
        try:
            yield folder
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)


# -- demo


def _add_keep(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--keep", help="Keep the scratch folder and print where it is.")


def _demo(options: argparse.Namespace, out: Output) -> int:
    """Show Relay at work for half a minute: real workers, retries, dead letters, a worker killed
    and one stopped in mid-job. Uses a scratch database in a temporary folder and never the
    project's own. Exits with 1 if anything that was promised was not observed.
    """
    arguments = ["demo", *(["--no-color"] if options.no_color else [])]
    with _scratch_folder("relay-demo-", keep=options.keep) as folder:
        place = variables("demo", folder)
        sys.stdout.flush()
        try:
            with started(arguments, Path.cwd(), place, stdout=None) as process:
                code = process.wait()
        except (KeyboardInterrupt, SystemExit):
            code = INTERRUPTED  # the process has said so
        if options.keep:
            command = f"{shlex.quote(sys.executable)} -m django relay status --settings {SETTINGS}"
            out.line()
            out.line(f"Kept in {folder}")
            out.line("Look at it with any verb of relay, for example:")
            out.line(f"  {DIRECTORY_VARIABLE}={shlex.quote(str(folder))} {command}")
    return code if code >= 0 else 128 - code


# -- drill


def _add_rows(parser: argparse.ArgumentParser) -> None:
    text = "Execute this row only, for example F4. May be repeated."
    parser.add_argument("--row", metavar="ROW", action="append", type=_row_name, help=text)
    flag(parser, "--sqlite", help="Use files of SQLite even if the queue is on PostgreSQL.")


def _row_name(text: str) -> str:
    # One number of a row is as near as another.
    return known_name(text.upper(), PROMISES, "a row of the failure table", "rows", cutoff=1.0)


def _drill(options: argparse.Namespace, out: Output) -> int:
    """Execute the failure table: real workers are killed, stopped, and kept from their database,
    and what came of it is read from the ledger and shown beside what Relay promises. Uses
    scratch databases and never the project's own: files in a temporary folder (TMPDIR names
    another), or, where the queue is on PostgreSQL, databases on that server that are dropped
    at the end. Takes up to two minutes. Exits with 1 if anything differs.
    """
    rows = [row for row in PROMISES if options.row is None or row in options.row]
    began = time.monotonic()
    server = None if options.sqlite else _server(conf.get().database)
    with _scratch_folder("relay-drill-") as folder:
        results = _play(rows, drills.Site(folder, server, f"{PREFIX}{uuid4().hex[:8]}"), out)
    seconds = time.monotonic() - began
    verdicts = Counter(result.verdict for result in results)
    kept = verdicts[KEPT]
    others = {"differ": verdicts[DIFFERS], "not_applicable": verdicts[NOT_APPLICABLE]}
    out.data(
        rows=[result.as_data() for result in results],
        engine="postgresql" if server else "sqlite",
        kept=kept,
        **others,
        seconds=round(seconds, 1),
    )
    _show_results(results, out)
    rest = [f", {n} {name.replace('_', ' ')}" for name, n in others.items() if n]
    text = f"{kept} of {len(results)} kept{''.join(rest)}, in {seconds:.0f} s."
    out.line(text, "bad" if verdicts[DIFFERS] else "good")
    return 1 if verdicts[DIFFERS] else 0


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


def _play(rows: Sequence[str], site: drills.Site, out: Output) -> list[Result]:
    """Return the results in the order of the table, showing each as it comes."""
    named = f" {site.prefix}_… on the queue's server" if site.server else ""
    out.line(f"On scratch databases{named}; the project's own is not touched.", "dim")
    found: dict[str, Result] = {}
    with out.progress("rows") as tell, closing(drills.play(rows, site)) as playing:
        for result in playing:
            found[result.row] = result
            text = f"{result.row:<3} {PROMISES[result.row].failure}: {result.verdict}"
            out.line(text, _STYLES[result.verdict])
            tell(len(found), len(rows))
    return [found[row] for row in rows]


def _show_results(results: Sequence[Result], out: Output) -> None:
    out.line()
    columns = ["failure", "promise", "observed", "verdict"]
    out.table(columns, map(_result_row, results), tall=(2, 3, 4, 0))
    for result in results:
        if result.log:
            out.line()
            out.line(f"{result.row}: the end of its workers' logs", "title")
            for line in result.log:
                out.line(f"  {line}", "dim")
    out.line()


def _result_row(result: Result) -> list[object]:
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


# -- bench


def _add_figures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        action="extend",
        type=_figure_name,
        help=f"Measure these figures only: {', '.join(SPECS)}.",
    )
    text = (
        "The alias of DATABASES to measure. Without it, the queue's: on PostgreSQL, scratch "
        "databases are made on its server, and the figures are those that begin with pg_."
    )
    parser.add_argument("--database", metavar="ALIAS", help=text)
    flag(parser, "--quick", help="Small sizes: under a minute, and less exact.")


def _figure_name(text: str) -> str:
    return known_name(text, SPECS, "a figure of bench", "figures", cutoff=0.5)


def _bench(options: argparse.Namespace, out: Output) -> int:
    """Measure speed, latency, fairness and cost on a scratch database in a temporary folder
    (TMPDIR names another; 3 GB must be free there), beside bare SQLite on the same disk. Real
    workers run, every commit is durable, and your own database is not touched. A full run takes
    up to ten minutes and both wants and deserves an idle machine. Exits with 1 if a figure misses
    its bar.
    """
    alias = options.database or conf.get().database
    if alias not in connections:
        raise CommandError(f"{alias!r} is not in DATABASES; it has {', '.join(connections)}.")
    server = Server.of(alias)
    names = options.only or names_for("postgresql" if server else "sqlite")
    with _scratch_folder("relay-bench-") as folder:
        facts = benches.facts(folder)
        _warn(facts, folder, out)
        figures = _measure(names, folder, options.quick, out, server)
    out.data(figures=figures, machine=facts)
    out.line()
    keys = ["name", "value", "unit", "baseline", "ratio", "bar"]
    rows = [[*(figure[key] for key in keys), _verdict(figure)] for figure in figures]
    out.table(["figure", *keys[1:], "verdict"], rows)
    _show_details(figures, out)
    out.facts(facts, "machine")
    return 0 if all(figure["ok"] for figure in figures) else 1


def _warn(facts: Mapping[str, Any], folder: Path, out: Output) -> None:
    """Say what makes the figures better or worse than they are."""
    if facts["filesystem"] in benches.IN_MEMORY:
        out.warn(
            f"{folder} is on {facts['filesystem']}, which keeps nothing: commits look faster "
            "than they are. Set TMPDIR to a folder on a disk."
        )
    if facts["load_average"] > facts["cpus"] / 2:
        out.warn(
            f"The load average is {facts['load_average']:g} on {facts['cpus']} processors: other "
            "programs are busy, so speeds will look lower than they are. Compare "
            "cpu_us_per_job instead, or measure again when the machine is idle."
        )


def _measure(
    names: Sequence[str], folder: Path, quick: bool, out: Output, server: Server | None
) -> list[Mapping[str, Any]]:
    """Return the figures in the order of the table, showing what goes on."""
    found: dict[str, Mapping[str, Any]] = {}

    def say(text: str) -> None:
        out.line(f"  {text} …", "dim")

    for family, wanted in benches.by_family(names).items():
        out.line(f"{family}: {', '.join(wanted)}", "title")
        place = folder / family
        for figure in benches.measure(family, wanted, place, quick=quick, say=say, server=server):
            found[figure["name"]] = figure
            _show_figure(figure, out)
    return [found[name] for name in SPECS if name in found]


def _show_figure(figure: Mapping[str, Any], out: Output) -> None:
    value = "not measured" if figure["value"] is None else f"{figure['value']:,g} {figure['unit']}"
    text = f"  {figure['name']} {value}, bar {figure['bar']}: {_verdict(figure)}"
    out.line(text, "good" if figure["ok"] else "bad")
    if figure["fault"]:
        out.line(f"    {figure['fault']}", "bad")


def _verdict(figure: Mapping[str, Any]) -> str:
    return "ok" if figure["ok"] else "MISSED"


def _show_details(figures: Sequence[Mapping[str, Any]], out: Output) -> None:
    """Say what each baseline did and what else was seen."""
    for figure in figures:
        context = ", ".join(f"{name} {value}" for name, value in figure["context"].items())
        baseline = f"; baseline: {figure['baseline_is']}" if figure["baseline_is"] else ""
        out.line()
        out.line(f"{figure['name']}: {SPECS[figure['name']].meaning}{baseline}")
        if context:
            out.line(f"  {context}", "dim")
    out.line()


VERBS: Final = {
    "demo": Verb(_demo, _add_keep, has_data=False),
    "drill": Verb(_drill, _add_rows),
    "bench": Verb(_bench, _add_figures),
}
"""The verbs by their names."""
