"""``relay bench``: the speed of this machine, beside bare SQLite."""

from __future__ import annotations

import argparse
import signal
import tempfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError
from django.db import connections

from relay_queue import conf
from relay_queue.cli.base import Output, add_json
from relay_queue.cli.output import Style
from relay_queue.lab.bench import runner
from relay_queue.lab.bench.figures import SPECS, names_for
from relay_queue.lab.processes import leaving_when_told
from relay_queue.lab.server import Server

HELP = (
    "Measure speed, latency, fairness and cost on a scratch database in a temporary folder "
    "(TMPDIR names another; 3 GB must be free there), beside bare SQLite on the same disk. Real workers run, every "
    "commit is durable, and your own database is not touched. A full run takes up to ten minutes "
    "and both wants and deserves an idle machine. Exits with 1 if a figure misses its bar."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    parser.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        action="extend",
        type=figure_name,
        help=f"Measure these figures only: {', '.join(SPECS)}.",
    )
    parser.add_argument(
        "--database",
        metavar="ALIAS",
        help="The alias of DATABASES to measure. Without it, the queue's: on PostgreSQL, scratch "
        "databases are made on its server, and the figures are those that begin with pg_.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="Small sizes: under a minute, and less exact."
    )


def figure_name(text: str) -> str:
    """Check the name of a figure, for argparse. Raises ``ArgumentTypeError`` with the nearest."""
    if text in SPECS:
        return text
    near = get_close_matches(text, SPECS, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"The figures are {', '.join(SPECS)}."
    raise argparse.ArgumentTypeError(f"{text!r} is not a figure of bench. {hint}")


def run(options: argparse.Namespace, out: Output) -> int:
    """Measure, show, and return 1 if any figure is not ok."""
    alias = options.database or conf.get().database
    if alias not in connections:
        raise CommandError(f"{alias!r} is not in DATABASES; it has {', '.join(connections)}.")
    server = Server.of(alias)
    names = options.only or names_for("postgresql" if server else "sqlite")
    with (
        leaving_when_told(signal.SIGINT, signal.SIGTERM),
        tempfile.TemporaryDirectory(prefix="relay-bench-", ignore_cleanup_errors=True) as name,
    ):
        folder = Path(name)
        facts = runner.facts(folder)
        _warn(facts, folder, out)
        figures = _measure(names, folder, options.quick, out, server)
    out.data({"figures": figures, "machine": facts})
    out.line()
    out.table(
        ["figure", "value", "unit", "baseline", "ratio", "bar", "verdict"],
        [_row(figure) for figure in figures],
    )
    _show_details(figures, out)
    out.facts(facts, "machine")
    return 0 if all(figure["ok"] for figure in figures) else 1


def _warn(facts: Mapping[str, Any], folder: Path, out: Output) -> None:
    """Say what makes the figures better or worse than they are."""
    if facts["filesystem"] in runner.IN_MEMORY:
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

    for family, wanted in runner.by_family(names).items():
        out.line(f"{family}: {', '.join(wanted)}", "title")
        for figure in runner.measure(
            family, wanted, folder / family, quick=quick, say=say, server=server
        ):
            found[figure["name"]] = figure
            _tell(figure, out)
    return [found[name] for name in SPECS if name in found]


def _tell(figure: Mapping[str, Any], out: Output) -> None:
    style: Style = "good" if figure["ok"] else "bad"
    value = "not measured" if figure["value"] is None else f"{figure['value']:,g} {figure['unit']}"
    out.line(f"  {figure['name']} {value}, bar {figure['bar']}: {_verdict(figure)}", style)
    if figure["fault"]:
        out.line(f"    {figure['fault']}", "bad")


def _verdict(figure: Mapping[str, Any]) -> str:
    return "ok" if figure["ok"] else "MISSED"


def _row(figure: Mapping[str, Any]) -> list[object]:
    keys = ("name", "value", "unit", "baseline", "ratio", "bar")
    return [*(figure[key] for key in keys), _verdict(figure)]


def _show_details(figures: Sequence[Mapping[str, Any]], out: Output) -> None:
    """Say what each baseline did and what else was seen."""
    for figure in figures:
        context = ", ".join(f"{name} {value}" for name, value in figure["context"].items())
        parts = [SPECS[figure["name"]].meaning]
        parts += [f"baseline: {figure['baseline_is']}"] if figure["baseline_is"] else []
        out.line()
        out.line(f"{figure['name']}: {'; '.join(parts)}")
        if context:
            out.line(f"  {context}", "dim")
    out.line()
