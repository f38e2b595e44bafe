"""What a worker process was asked to do, and how it talks to its supervisor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The settings of one worker process, all resolved: no field falls back on anything.

    ``queues`` None means every queue but the ``exclude_queues``; ``backend`` None means every alias
    that Relay backs. ``lease_seconds`` None means what each job asks for. ``max_jobs`` ends the
    process after that many jobs, ``drain`` when no ready, due or running job is left for it.
    """

    name: str
    queues: tuple[str, ...] | None
    exclude_queues: tuple[str, ...]
    backend: str | None
    concurrency: int
    lease_seconds: float | None
    shutdown_timeout_seconds: float
    drain: bool
    max_jobs: int | None

    def served(self, queues: Iterable[str]) -> list[str]:
        """Return which of these queues the worker serves, in the order that it was given."""
        if self.queues is not None:
            return list(self.queues)
        return [name for name in queues if name not in self.exclude_queues]


# Supervisor to worker, one byte each. End of file means that the supervisor is gone: drain.
DRAIN = b"d"
QUIT = b"q"  # hand everything back and exit at once
LOOK = b"l"  # a sibling died: look for dead workers now

# Worker to supervisor.
READY = b"r"  # recovery has run and claiming has begun
WAITS = b"w"  # the database is asked, and has not answered yet
ANSWERED = b"a"  # it has
DISMISSED = b"x"  # an operator has ordered this worker to stop: no other is to take its place
