"""``python -m relay_queue.lab WORK …``: a process that does one piece of work for a command.

* ``bench FAMILY NAME…`` measures figures. It writes JSON, one value a line: ``{"say": …}`` for
  progress, ``{"figure": …}``, and ``{"failed": …}`` if it had to give up.
* ``drill ROW`` executes a row of the failure table, and writes the result as JSON.
* ``demo`` shows the demo.
* ``kill-writer N…`` enqueues N jobs in one transaction, for each N, and kills itself: what it has
  committed is in the log, and the database is not closed.

The variables of the environment name the scratch project, see `settings`. The process ends, with its
workers, when its standard input is closed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import django

from relay_queue.lab.processes import LabError, leave_with_parent
from relay_queue.lab.settings import DIRECTORY_VARIABLE

FAMILIES: Final = {
    "load": ("throughput.load",),
    "single": ("throughput.single",),
    "depth": ("throughput.depth",),
    "enqueue": ("throughput.enqueue",),
    "latency": ("latency.pickup",),
    "recovery": ("latency.recovery",),
    "resources": ("resources.idle_cpu", "resources.memory"),
    "console": ("console.on_file",),
    "postgresql": (
        "throughput.load_on_server",
        "throughput.depth_on_server",
        "latency.pickup_on_server",
    ),
    "postgresql_console": ("console.on_server",),
}
"""What measures the figures of each family, by module and function of `relay_queue.lab.bench`."""


def main() -> int:
    """Do what the command line names, and return the exit code."""
    options = _parse()
    if options.work == "kill-writer":
        return _kill_writer(options.sizes)
    leave_with_parent()
    django.setup()
    directory = Path(os.environ[DIRECTORY_VARIABLE])
    if options.work == "bench":
        _bench(options, directory)
        return 0
    if options.work == "drill":
        from relay_queue.lab.drill import rows

        rows.run(options.row, directory)
        return 0
    from relay_queue.lab import demo

    return demo.run(directory, color=options.color)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m relay_queue.lab")
    work = parser.add_subparsers(dest="work", required=True)
    bench = work.add_parser("bench")
    bench.add_argument("family")
    bench.add_argument("names", nargs="+")
    bench.add_argument("--quick", action="store_true")
    work.add_parser("drill").add_argument("row")
    work.add_parser("demo").add_argument("--no-color", dest="color", action="store_false")
    work.add_parser("kill-writer").add_argument("sizes", nargs="+", type=int)
    return parser.parse_args()


def _bench(options: argparse.Namespace, directory: Path) -> None:
    from relay_queue.lab.bench.workload import Run

    run = Run(options.names, options.quick, directory, lambda text: _write("say", text))
    try:
        for place in FAMILIES[options.family]:
            module, _, name = place.partition(".")
            measure = getattr(import_module(f"relay_queue.lab.bench.{module}"), name)
            for figure in measure(run):
                _write("figure", figure.as_data())
    except LabError as error:
        _write("failed", str(error))


def _write(kind: str, value: Any) -> None:
    sys.stdout.write(json.dumps({kind: value}) + "\n")
    sys.stdout.flush()


def _kill_writer(sizes: list[int]) -> int:
    django.setup()
    from relay_queue.lab.project import enqueue_many
    from relay_queue.lab.tasks import KILLED_WRITER, pay

    for size in sizes:
        enqueue_many(pay.bind(f"order {n} {KILLED_WRITER}") for n in range(size))
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
