"""Looking at a process from outside. What a system does not tell is None."""

from __future__ import annotations

import os
from pathlib import Path

_KIB_PER_MIB = 1024


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended; one that waits to be reaped has."""
    stat = _read(pid, "stat")
    if stat is not None:
        return stat.rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def threads(pid: int) -> int | None:
    """Return how many threads a process has."""
    return _number(pid, "Threads:")


def resident_mib(pid: int) -> float | None:
    """Return the resident memory of a process, shared pages included, in MiB."""
    kib = _number(pid, "VmRSS:")
    return None if kib is None else kib / _KIB_PER_MIB


def _number(pid: int, key: str) -> int | None:
    for line in (_read(pid, "status") or "").splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return None


def _read(pid: int, name: str) -> str | None:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
