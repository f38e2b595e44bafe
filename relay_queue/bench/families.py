"""Running the families of figures, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import relay_queue
from relay_queue.bench.figures import SPECS, Figure

STOP_SECONDS = 30.0


def by_family(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the families that measure these figures, with the figures of each."""
    families: dict[str, list[str]] = {}
    for name, spec in SPECS.items():
        if name in names:
            families.setdefault(spec.family, []).append(name)
    return families


def measure(
    family: str, names: Sequence[str], folder: Path, *, quick: bool, say: Callable[[str], None]
) -> Iterator[Mapping[str, Any]]:
    """Yield the figures of one family as they come, as plain values; ``folder`` must be new.

    A figure that could not be measured has no value, is not ok, and its ``fault`` says why.
    """
    folder.mkdir()
    missing, reason = list(names), ""
    with _measuring(family, names, folder, quick) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for kind, value in json.loads(line).items():
                if kind == "figure":
                    missing.remove(value["name"])
                    yield value
                elif kind == "failed":
                    reason = value
                else:
                    say(value)
        code = process.wait()
    for name in missing:
        yield _unmeasured(name, reason or f"the process that measures it ended with code {code}")


def _unmeasured(name: str, fault: str) -> Mapping[str, Any]:
    spec = SPECS[name]
    return Figure(name, None, spec.unit, None, None, str(spec.bar), False, fault=fault).as_data()


@contextmanager
def _measuring(
    family: str, names: Sequence[str], folder: Path, quick: bool
) -> Iterator[subprocess.Popen[str]]:
    """Start the process that measures; leave nothing of it or of its workers behind."""
    arguments = [family, str(folder), *names, *(["--quick"] if quick else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "relay_queue.bench", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
        cwd=folder,
        text=True,
        # A group of its own: Ctrl-C reaches us alone, and what is left at the end can be ended.
        start_new_session=True,
    )
    try:
        with process:
            try:
                yield process
            finally:
                _end(process)
    finally:
        _end_group(process.pid)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # as it should be: the process has stopped all that it started


def _environment() -> dict[str, str]:
    """Return an environment in which the package is found from any directory."""
    root = str(Path(relay_queue.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
