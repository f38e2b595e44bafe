"""``python -m relay_queue.bench FAMILY FOLDER NAME... [--quick]``: measure one family of figures.

Started by ``manage.py relay bench``. Writes JSON, one value a line: ``{"say": …}`` for progress and
``{"figure": …}``. Ends, with its workers, when its standard input is closed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any


def main() -> None:
    """Measure what the command line names."""
    options = _parse()
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # Both before Django's settings are read.
    os.environ["DJANGO_SETTINGS_MODULE"] = "relay_queue.bench.settings"
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


def _leave(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the stopping
    # An exception, so that every block on the way out stops what it has started.
    raise SystemExit(1)


def _leave_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
