"""``python -m relay_queue.bench FAMILY FOLDER NAME... [--quick]``: measure one family of figures.

Started by ``manage.py relay bench``. Writes JSON, one value a line: ``{"say": …}`` for progress and
``{"figure": …}``. Ends, with its workers, when its standard input is closed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from relay_queue.bench.figures import WITH_CONSOLE
from relay_queue.scratch import dependent


def main() -> None:
    """Measure what the command line names."""
    options = _parse()
    dependent.leave_with_parent()
    # Both before Django's settings are read.
    module = "console_settings" if options.family in WITH_CONSOLE else "settings"
    os.environ["DJANGO_SETTINGS_MODULE"] = f"relay_queue.bench.{module}"
    os.environ["RELAY_BENCH_DB"] = str(options.folder / "unused.sqlite3")
    import django

    django.setup()
    from relay_queue.bench.measuring import BenchError
    from relay_queue.bench.run import Run

    family = importlib.import_module(f"relay_queue.bench.{options.family}")
    run = Run(options.names, options.quick, options.folder, lambda text: _tell("say", text))
    try:
        for figure in family.measure(run):
            _tell("figure", figure.as_data())
    except BenchError as error:
        _tell("failed", str(error))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m relay_queue.bench")
    parser.add_argument("family")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def _tell(kind: str, value: Any) -> None:
    sys.stdout.write(json.dumps({kind: value}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
