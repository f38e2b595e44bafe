"""What a running function can know of its job, and how it learns that it should stop."""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass
from datetime import datetime
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from relay_queue.compat import TaskContext
from relay_queue.exceptions import Cancelled, TimedOut
from relay_queue.timing import slot_of

if TYPE_CHECKING:
    from typing import Self

    from relay_queue.store.records import Claim

TIMED_OUT = "its time is over"
"""The reason that `JobContext.cancel` gets when the timeout has passed."""

GRACE_SECONDS = 0.1
"""How long a function may take to raise `TimedOut` by itself after its deadline. If the loop
settled for it at once, the function's own outcome would look like a late return."""

_current: ContextVar[JobContext | None] = ContextVar("relay_queue_job", default=None)


def current_context() -> JobContext | None:
    """Return the context of the job that this code runs in, or None outside of jobs."""
    return _current.get()


def enter(context: JobContext) -> Token[JobContext | None]:
    """Make ``context`` the current one; for the executor."""
    return _current.set(context)


def leave(before: Token[JobContext | None]) -> None:
    """Make the context current again that was when `enter` returned ``before``."""
    _current.reset(before)


@dataclass(slots=True, eq=False)
class JobContext:
    """One attempt of one job, shared by the function that runs it and the loop that watches it.

    ``epoch`` is the lease's id: it grows with every lease, so an outside system can refuse a call
    with a smaller one than it has seen. ``deadline`` is a reading of ``time.monotonic``. ``worker``
    is the incarnation of the worker process. ``left_open`` are the aliases of connections that
    other threads of this job were found to have left in a transaction. Python cannot stop a thread:
    a function that runs long looks at ``cancelled``, or calls `raise_if_cancelled`, now and then.
    """

    job_id: int
    queue: str
    attempt: int
    epoch: int
    idempotency_key: str | None = None
    deadline: float | None = None
    worker: str = ""
    cancel_reason: str = ""
    waits: bool = False
    """Whether the function has not begun, and its time with it: it waits for the writer."""
    left_open: tuple[str, ...] = ()

    @classmethod
    def of(cls, claim: Claim, worker: str = "") -> Self:
        """Make the context of a claim; the time limit of the attempt begins now."""
        timeout = claim.timeout_seconds
        return cls(
            claim.job_id,
            claim.queue,
            claim.attempt,
            claim.lease_id,
            claim.idempotency_key,
            None if timeout is None else monotonic() + timeout,
            worker,
        )

    def start_clock(self, timeout_seconds: float | None) -> None:
        """Start the time limit over, now that the function begins."""
        # In this order, so that the loop, in its own thread, does not apply the old limit once
        # more.
        self.deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        self.waits = False

    @property
    def slot(self) -> datetime | None:
        """The moment that a scheduled run stands for, aware UTC; None if no schedule made the job.

        To be used in the place of now: the run may be late.
        """
        return slot_of(self.idempotency_key)

    @property
    def timed_out(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and monotonic() >= self.deadline

    @property
    def overdue_from(self) -> float:
        """When the function has run past its time limit and has had time to say so."""
        if self.waits or self.deadline is None:
            return inf
        return self.deadline + GRACE_SECONDS

    @property
    def cancelled(self) -> bool:
        """Whether the function should stop: its result will most likely be refused."""
        return bool(self.cancel_reason) or self.timed_out

    def cancel(self, reason: str) -> None:
        """Ask the function to stop. The first reason stays."""
        self.cancel_reason = self.cancel_reason or reason or "cancelled"

    def raise_if_cancelled(self) -> None:
        """Raise `TimedOut` or `Cancelled` if the function should stop."""
        if self.timed_out or self.cancel_reason == TIMED_OUT:
            raise TimedOut(f"job {self.job_id} ran out of time in attempt {self.attempt}")
        if self.cancel_reason:
            raise Cancelled(f"job {self.job_id} should stop: {self.cancel_reason}")

    def remaining_seconds(self) -> float | None:
        """Return the seconds until the deadline, at least 0; None if there is none."""
        return None if self.deadline is None else max(self.deadline - monotonic(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayContext(TaskContext):  # type: ignore[misc, type-arg]
    """The framework's context of a task, with what Relay knows of the job.

    ``job`` is the `JobContext`; what functions need most is repeated here.
    """

    job: JobContext

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1 up."""
        return self.job.attempt

    @property
    def job_id(self) -> int:
        """The id of the job."""
        return self.job.job_id

    @property
    def epoch(self) -> int:
        """The id of the lease, for fencing in outside systems."""
        return self.job.epoch

    @property
    def idempotency_key(self) -> str | None:
        """The key that the job was enqueued with; the same in every attempt."""
        return self.job.idempotency_key

    @property
    def slot(self) -> datetime | None:
        """The moment that a scheduled run stands for, aware UTC; None if no schedule made the job."""
        return self.job.slot

    @property
    def deadline(self) -> float | None:
        """When the time of this attempt is over, as ``time.monotonic`` tells it; None is never."""
        return self.job.deadline

    @property
    def cancelled(self) -> bool:
        """Whether the function should stop."""
        return self.job.cancelled

    def raise_if_cancelled(self) -> None:
        """Raise `TimedOut` or `Cancelled` if the function should stop."""
        self.job.raise_if_cancelled()

    def remaining_seconds(self) -> float | None:
        """Return the seconds until the deadline, or None if there is none."""
        return self.job.remaining_seconds()


__all__ = [
    "GRACE_SECONDS",
    "TIMED_OUT",
    "JobContext",
    "RelayContext",
    "current_context",
    "enter",
    "leave",
]
