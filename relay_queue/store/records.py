"""What the store takes and gives: plain values, no models, no connection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

from relay_queue.backoff import Backoff

Verb = Literal["ack", "nack", "snooze", "release"]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What many calls of one task have in common, validated. Made by `relay_queue.store.job_options`."""

    queue: str
    backend: str
    task: str
    priority: int
    run_after: datetime | None
    max_attempts: int
    lease_seconds: float
    timeout_seconds: float | None
    backoff: Backoff


class NewJob(NamedTuple):
    """A validated job that is not in the table yet. Made by `relay_queue.store.new_job`."""

    options: JobOptions
    payload: str
    checksum: int
    idempotency_key: str | None


class Enqueued(NamedTuple):
    """The answer to an enqueue. ``created`` is false when the idempotency key found a job."""

    job_id: int
    created: bool
    state: str
    created_at: datetime


@dataclass(slots=True)
class Claim:
    """A job with the lease under which it may run.

    ``expires_at`` is the wall clock of the table; the loop keeps its own monotonic deadline.
    ``suspect`` says that two of its owners in a row died or vanished, and
    ``wait_seconds`` is how long the job was ready before it was claimed.
    """

    lease_id: int
    token: str
    job_id: int
    queue: str
    backend: str
    task: str
    payload: str
    idempotency_key: str | None
    priority: int
    attempt: int
    attempts_left: int
    suspect: bool
    lease_seconds: float
    timeout_seconds: float | None
    created_at: datetime
    acquired_at: datetime
    expires_at: datetime
    wait_seconds: float

    def settlement(self, verb: Verb, result: str | None = None, **facts: Any) -> Settlement:
        """Return the settlement of this claim's lease; ``facts`` are more fields of `Settlement`."""
        return Settlement(verb, self.lease_id, self.token, result, **facts)


# From this many losses in a row a job is held to be the likely cause of its owners' deaths.
SUSPECT_LOSSES = 2


@dataclass(slots=True)
class Settlement:
    """What became of one lease, as its owner tells it.

    ``result`` is JSON text (ack). ``error`` is the path of the exception's class, ``message`` one
    line, ``traceback`` many (nack). ``delay_seconds`` replaces the back-off (nack) or is the length
    of the snooze. All texts are storable: see `relay_queue.payload.clean_text`. ``repeated`` says
    that it was given before, in a transaction that may have committed. ``death_logged`` says that its owner
    has logged already that the job will not be tried again. ``unrun`` says of a release that the
    owner has not called the function.
    """

    verb: Verb
    lease_id: int
    token: str
    result: str | None = None
    error: str = ""
    message: str = ""
    traceback: str = ""
    fatal: bool = False
    timed_out: bool = False
    delay_seconds: float | None = None
    repeated: bool = False
    death_logged: bool = False
    unrun: bool = False


class Settled(NamedTuple):
    """The store's answer to a settlement.

    ``reason`` is empty when the settlement stands; else it says why it was refused. ``job_id`` is
    None when no lease has that id and token.
    """

    lease_id: int
    job_id: int | None
    queue: str
    state: str
    reason: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the settlement changed, or had already changed, the job."""
        return not self.reason


class Recovered(NamedTuple):
    """A lease that was ended for its owner: its job, and the state that the job went to."""

    lease_id: int
    job_id: int
    queue: str
    outcome: str
    state: str


@dataclass(frozen=True, slots=True)
class Changed:
    """The answer of an operator's verb: what it changed, and what it found in another state.

    ``skipped`` has the states of the others by id, and ``missing`` the ids that no job has.
    ``before`` has the states that the changed jobs came from. ``left`` are those that the
    transaction had no room for: the verb wants to be called again with them.
    """

    job_ids: list[int] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list, compare=False)
    before: dict[int, str] = field(default_factory=dict, compare=False)
    left: list[int] = field(default_factory=list, compare=False)

    def leave(self, job_ids: Iterable[int]) -> None:
        """Note that nothing was done yet to some of the jobs that were to be changed."""
        self.left.extend(job_ids)
        for job_id in self.left:
            self.job_ids.remove(job_id)
            del self.before[job_id]

    def add(self, other: Changed) -> None:
        """Take in what another transaction has done."""
        self.job_ids.extend(other.job_ids)
        self.skipped.update(other.skipped)
        self.missing.extend(other.missing)
        self.before.update(other.before)
