"""``relay demo``: Relay at work on a scratch database, each claim checked against its tables.

The verb makes a temporary folder and runs itself again in a second process, with the settings of
`relay_queue.cli.demo.settings`: nothing there knows the project's database.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from relay_queue.cli.base import Output
from relay_queue.cli.demo import scratch

HELP = (
    "Show Relay at work for half a minute: real workers, retries, dead letters, a worker killed "
    "and one stopped in mid-job. Uses a scratch database in a temporary folder and never the "
    "project's own. Exits with 1 if anything that was promised was not observed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--keep", action="store_true", help="Keep the scratch folder and print where it is."
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Make the folder and run the second process in it, or be the second process."""
    inside = scratch.current_directory()
    if inside is not None:
        # Only there: it makes tasks, which look at the settings.
        from relay_queue.cli.demo import director

        return director.run(inside, out, color=not options.no_color)
    directory = scratch.make_directory()
    try:
        code = _run_second(directory, options)
        if options.keep:
            out.line()
            out.line(f"Kept in {directory}")
            out.line("Look at it with any verb of relay, for example:")
            out.line(f"  {scratch.command(directory, 'status')}")
        return code
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)


def _run_second(directory: Path, options: argparse.Namespace) -> int:
    """Run the second process to its end and return its exit code.

    Orders to stop are passed on, and waited for: the folder must be there until the other process
    has stopped everything.
    """
    arguments = [sys.executable, "-m", "django", "relay", "demo"]
    if options.no_color:
        arguments.append("--no-color")
    second: subprocess.Popen[bytes] | None = None
    asked: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if second is not None:
            second.send_signal(signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, pass_on) for number in numbers]
    try:
        sys.stdout.flush()
        second = subprocess.Popen(arguments, env={**os.environ, **scratch.environment(directory)})
        if asked:
            second.send_signal(signal.SIGTERM)
        code = second.wait()
        return code if code >= 0 else 128 - code
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
