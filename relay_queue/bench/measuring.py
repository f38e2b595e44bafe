"""Reading clocks, processes and samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MIB = 1024 * 1024
_KIB = 1024


class BenchError(Exception):
    """A figure could not be measured. The message says why."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that ``percent`` per cent of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def timed(act: Callable[[], object]) -> float:
    """Return how many seconds a call took."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def wait_for(what: str, look: Callable[[], T | None], *, seconds: float, pause: float = 0.02) -> T:
    """Look again and again until there is something, and return it.

    Raises `BenchError`, naming ``what``, after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise BenchError(f"{what} did not happen within {seconds:g} s")
        time.sleep(pause)  # other processes make it happen; they tell nobody
    return found


def cpu_seconds(pid: int) -> float:
    """Return the processor time that the living threads of a process have used."""
    # Nanoseconds; the counters in /proc/PID/stat have steps of 10 ms.
    used = 0
    for path in _read_proc(pid, "task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            used += int((path / "schedstat").read_text().split()[0])
    return used / 1e9


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process, shared pages included, in MiB."""
    return _memory_mib(_read_proc(pid, "status"), "VmRSS:")


def proportional_mib(pid: int) -> float:
    """Return the memory of a process in MiB, each shared page divided by those who share it."""
    return _memory_mib(_read_proc(pid, "smaps_rollup"), "Pss:")


def _memory_mib(path: Path, key: str) -> float:
    for line in path.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * _KIB / MIB
    raise BenchError(f"{path} has no {key}")


def _read_proc(pid: int, name: str) -> Path:
    path = Path(f"/proc/{pid}/{name}")
    if not path.exists():
        raise BenchError(f"{path} is missing: this figure needs Linux and a living process")
    return path
