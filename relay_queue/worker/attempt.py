"""One attempt of a job in this process: from the grant of its lease to the commit of its outcome.

The loop, the slots and the executor share this one object. Each of its attributes is written by one
of them only, so it needs no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

from relay_queue.compat import AnyResult, AnyTask, BaseTaskBackend
from relay_queue.context import JobContext
from relay_queue.exceptions import Cancelled, Fatal, PayloadError, ResultError, Retry, TimedOut
from relay_queue.store.records import Claim, Settled, Settlement


@dataclass(frozen=True, slots=True)
class Rules:
    """Which exceptions a task tries again. See `relay_queue.task.RelayTask`."""

    retry_on: tuple[type[BaseException], ...] = ()
    fatal_on: tuple[type[BaseException], ...] = ()

    def are_fatal(self, kind: type[BaseException]) -> bool:
        """Say whether an exception of this class ends the job."""
        # Not isinstance: it believes an instance that lies about its __class__.
        if issubclass(kind, (Fatal, *self.fatal_on)):
            return True
        if issubclass(kind, ResultError):
            # Named, and not only covered by a class as wide as Exception.
            return not any(issubclass(wanted, PayloadError) for wanted in self.retry_on)
        tried_again = (Retry, Cancelled, TimedOut, *self.retry_on)
        return bool(self.retry_on) and not issubclass(kind, tried_again)


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What all jobs of one task have in common; made once."""

    task: AnyTask
    func: Callable[..., Any]
    sender: type[BaseTaskBackend]
    rules: Rules
    takes_context: bool
    is_coroutine: bool
    atomic: bool


@dataclass(slots=True, eq=False)
class Attempt:
    """One claimed job in the hands of this process. All times are monotonic seconds.

    The loop writes ``until``, ``in_slot`` and ``stuck``; the thread that runs the attempt writes
    the rest. ``plan``, ``args`` and ``kwargs`` are set when it begins, ``settlement`` when it is
    over.
    """

    claim: Claim
    context: JobContext
    until: float = inf
    """When the lease ends, as far as this process knows."""

    in_slot: bool = False
    stuck: bool = False
    """Whether the lease is over but the function has not returned."""

    thread: int | None = None
    """The ident of the thread that runs the function, once it does."""

    coroutine_result: Callable[[], Any] | None = None
    """Gives what a coroutine has returned, or raises what it has raised; None for other functions."""

    shown: AnyResult | None = None
    """What signals and the task's context show; made only if something asks for it."""

    settled: Settled | None = None
    """The store's answer, if the function's own transaction has acked the attempt."""

    returned_at: float = 0.0
    """When the function returned: the attempt is judged by it, however long the outcome waits."""

    run_seconds: float = 0.0
    in_time: bool = True
    """Whether the function returned within its time limit."""

    plan: TaskPlan = field(init=False)
    args: Any = field(init=False)
    kwargs: Any = field(init=False)
    started: float = field(init=False)
    settlement: Settlement = field(init=False)

    def end_unrun(self, settlement: Settlement, run_seconds: float = 0.0) -> None:
        """Note the outcome of an attempt whose function was not called."""
        self.settlement = settlement
        self.run_seconds = run_seconds
        self.returned_at = monotonic()

    def renew_from(self) -> float:
        """Return when half of the lease is over."""
        return self.until - self.claim.lease_seconds / 2

    def next_event(self) -> float:
        """Return when the lease must be renewed or the function be stopped, or an earlier time."""
        timeout_seconds = self.claim.timeout_seconds
        if self.context.waits and timeout_seconds is not None:
            # The clock of the function may start at any moment from now on.
            return min(self.renew_from(), monotonic() + timeout_seconds)
        return min(self.renew_from(), self.context.overdue_from)
