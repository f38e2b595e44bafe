"""The journal: what the functions of a scratch project say of themselves, in a file.

It is their outside world. The tables say what should have run; the journal says what did.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from relay_queue.context import JobContext


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. ``at`` is a reading of the monotonic clock, which processes of a host share."""

    event: str
    job_id: int
    attempt: int
    epoch: int
    pid: int
    at: float


def write(directory: str, event: str, job: JobContext) -> None:
    """Append a line. One small write to a file opened for appending is never torn by another."""
    entry = Entry(event, job.job_id, job.attempt, job.epoch, os.getpid(), time.monotonic())
    line = json.dumps(asdict(entry)) + "\n"
    descriptor = os.open(_path(directory), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read(directory: Path, event: str = "started", job_id: int | None = None) -> list[Entry]:
    """Return the entries of an event, of all jobs or of one, in the order they were written."""
    path = _path(directory)
    if not path.exists():
        return []
    entries = [Entry(**json.loads(line)) for line in path.read_text().splitlines()]
    return [e for e in entries if e.event == event and job_id in (None, e.job_id)]


def _path(directory: str | Path) -> Path:
    return Path(directory) / "journal"
