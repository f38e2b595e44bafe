"""``relay demo``: Relay at work on a scratch database, each claim checked against its tables."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from relay_queue.cli.base import INTERRUPTED, Output
from relay_queue.lab.processes import STOPPING, leaving_when_told, make_folder, started
from relay_queue.lab.project import SETTINGS, variables
from relay_queue.lab.settings import DIRECTORY_VARIABLE

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
    """Make the folder, show the demo in a process that has the scratch settings, and tidy up."""
    directory = make_folder("relay-demo-")
    try:
        code = _show(directory, options)
        if options.keep:
            command = f"{shlex.quote(sys.executable)} -m django relay status --settings {SETTINGS}"
            out.line()
            out.line(f"Kept in {directory}")
            out.line("Look at it with any verb of relay, for example:")
            out.line(f"  {DIRECTORY_VARIABLE}={shlex.quote(str(directory))} {command}")
        return code
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)


def _show(directory: Path, options: argparse.Namespace) -> int:
    """Run the process to its end and return its exit code.

    When told to stop, wait for its end: the folder must be there until it has stopped everything.
    """
    arguments = ["demo", *(["--no-color"] if options.no_color else [])]
    sys.stdout.flush()
    try:
        with (
            leaving_when_told(*STOPPING),
            started(arguments, Path.cwd(), variables("demo", directory), stdout=None) as process,
        ):
            code = process.wait()
    except (KeyboardInterrupt, SystemExit):
        return INTERRUPTED  # the process has said so
    return code if code >= 0 else 128 - code
