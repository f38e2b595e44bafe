"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import sqlite3
from pathlib import Path
from typing import Any, Final

import django

from relay_queue.bench.measuring import percentile, timed

SYNCS = 50
BLOCK = b"\0" * 4096
IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
"""File systems that lose everything with the power: a sync there costs nothing and means nothing."""


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
