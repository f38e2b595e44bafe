"""The side of the command: a family of figures in a process of its own, and what machine this is."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import django

from relay_queue.lab.bench.figures import ON_SERVER, SPECS, WITH_CONSOLE, Figure, percentile, timed
from relay_queue.lab.processes import started
from relay_queue.lab.project import variables
from relay_queue.lab.server import Server

SYNCS: Final = 50
BLOCK: Final = b"\0" * 4096
IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
"""File systems that lose everything with the power: a sync there costs nothing and means nothing."""


def by_family(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the families that measure these figures, with the figures of each."""
    families: dict[str, list[str]] = {}
    for name, spec in SPECS.items():
        if name in names:
            families.setdefault(spec.family, []).append(name)
    return families


def measure(
    family: str,
    names: Sequence[str],
    folder: Path,
    *,
    quick: bool,
    say: Callable[[str], None],
    server: Server | None = None,
) -> Iterator[Mapping[str, Any]]:
    """Yield the figures of one family as they come, as plain values; ``folder`` must be new.

    Only a family of a server uses ``server``. A figure that could not be measured has no value, is
    not ok, and its ``fault`` says why.
    """
    folder.mkdir()
    missing, reason = list(names), ""
    use = "console" if family in WITH_CONSOLE else "bench"
    place = variables(use, folder, server if family in ON_SERVER else None)
    arguments = ["bench", family, *names, *(["--quick"] if quick else [])]
    with started(arguments, folder, place) as process:
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


def facts(folder: Path) -> dict[str, Any]:
    """Return what decides the figures; ``folder`` is where the scratch databases are."""
    return {
        "python": platform.python_version(),
        "django": django.get_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()}",
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "cpu_model": _cpu_model(),
        "load_average": round(os.getloadavg()[0], 2),
        "filesystem": file_system(folder),
        "fsync_p50_us": _fsync_p50_us(folder),
    }


def file_system(folder: Path) -> str | None:
    """Return the type of the file system of a folder, or None where that cannot be read."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1:3] for line in mounts if folder.resolve().is_relative_to(_mount(line))]
    # The longest mount point is the one; of two mounts on one point the later one.
    return max(reversed(found), key=lambda mount: len(mount[0]))[1] if found else None


def _mount(line: str) -> str:
    return line.split()[1].replace("\\040", " ")


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), None)


def _fsync_p50_us(folder: Path) -> int:
    """Return the median time of an append of 4 KiB with its fsync, in microseconds."""
    with (folder / "fsync").open("wb", buffering=0) as file:

        def append() -> None:
            file.write(BLOCK)
            os.fsync(file.fileno())

        return round(percentile([timed(append) for _ in range(SYNCS)], 50) * 1e6)
