"""The life of a job in plain Python: section 4 of the design, written without a look at the store.

`Model` holds dictionaries and obeys the rules one job at a time, in the most obvious way. The
state-machine test runs the same verbs on it and on the store, and compares everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

WAITING = ("scheduled", "retrying")
UNFINISHED = ("scheduled", "ready", "running", "retrying")
FINISHED = ("succeeded", "dead", "cancelled")

BACKOFF_BASE_SECONDS = 2.0
BACKOFF_MAX_SECONDS = 5.0
LEASE_SECONDS = 60.0


@dataclass
class ModelQueue:
    capacity: int | None = None
    max_running: int | None = None
    aging_seconds: float | None = 60.0
    paused: bool = False


@dataclass
class ModelLease:
    id: int
    token: str
    attempt: int
    worker_id: int | None
    expires_at: datetime
    outcome: str | None = None
    refused_verb: str = ""


@dataclass
class ModelJob:
    id: int
    queue: str
    call: int
    key: str | None
    priority: int
    max_attempts: int
    state: str
    available_at: datetime
    behind: timedelta = timedelta(0)
    """How far its rank lies behind its time, as its place in a batch with keys."""
    attempt: int = 0
    attempt_base: int = 0
    losses: int = 0
    finished_at: datetime | None = None
    leases: list[ModelLease] = field(default_factory=list)

    @property
    def used(self) -> int:
        return self.attempt - self.attempt_base

    @property
    def suspect(self) -> bool:
        return self.losses >= 2


@dataclass(frozen=True)
class Spec:
    """What a producer asks for."""

    queue: str
    call: int
    key: str | None
    priority: int
    max_attempts: int
    delay_seconds: float


@dataclass(frozen=True)
class Answer:
    """What the store should answer to one settlement."""

    job_id: int | None
    state: str
    accepted: bool


class Model:
    def __init__(self, queues: dict[str, ModelQueue], now: datetime) -> None:
        self.queues = queues
        self.now = now
        self.jobs: dict[int, ModelJob] = {}

    # --- looks -------------------------------------------------------------------------------

    def counts(self) -> dict[tuple[str, str], int]:
        return dict(Counter((job.queue, job.state) for job in self.jobs.values()))

    def in_state(self, queue: str, *states: str) -> list[ModelJob]:
        return [j for j in self.jobs.values() if j.queue == queue and j.state in states]

    def order(self, queue: str) -> list[ModelJob]:
        """The ready jobs of a queue, first to last."""
        return sorted(self.in_state(queue, "ready"), key=self._place)

    def _place(self, job: ModelJob) -> tuple[object, ...]:
        aging = self.queues[job.queue].aging_seconds
        ranked_at = job.available_at + job.behind
        if aging is None:
            return (-job.priority, ranked_at, job.id)
        return (ranked_at - timedelta(seconds=aging * job.priority), job.id)

    def room(self, queue: str) -> float:
        capacity = self.queues[queue].capacity
        return (
            float("inf") if capacity is None else capacity - len(self.in_state(queue, *UNFINISHED))
        )

    def holder(self, spec: Spec) -> ModelJob | None:
        for job in self.jobs.values():
            if spec.key is not None and (job.queue, job.key) == (spec.queue, spec.key):
                return job
        return None

    def lease(self, lease_id: int) -> tuple[ModelJob, ModelLease] | None:
        for job in self.jobs.values():
            for lease in job.leases:
                if lease.id == lease_id:
                    return job, lease
        return None

    def open_leases(self) -> Iterator[tuple[ModelJob, ModelLease]]:
        for job in self.jobs.values():
            if job.state == "running":
                yield job, job.leases[-1]

    # --- enqueue -----------------------------------------------------------------------------

    def refusals(self, specs: Sequence[Spec]) -> set[str]:
        """Why a batch cannot be enqueued: "conflict", "full", both, or nothing."""
        reasons: set[str] = set()
        calls: dict[tuple[str, str], int] = {}
        wanted: Counter[str] = Counter()
        for spec in specs:
            held = self.holder(spec)
            if held is not None:
                if held.call != spec.call:
                    reasons.add("conflict")
                continue
            if spec.key is None:
                wanted[spec.queue] += 1
            elif calls.setdefault((spec.queue, spec.key), spec.call) != spec.call:
                reasons.add("conflict")
        for queue, _key in calls:
            wanted[queue] += 1
        if any(wanted[queue] > self.room(queue) for queue in wanted if wanted[queue]):
            reasons.add("full")
        return reasons

    def add(self, job_id: int, spec: Spec, place: int = 0) -> None:
        """Add a job; ``place`` is its place in its batch, where ids do not follow the calls."""
        self.jobs[job_id] = ModelJob(
            id=job_id,
            queue=spec.queue,
            call=spec.call,
            key=spec.key,
            priority=spec.priority,
            max_attempts=spec.max_attempts,
            state="scheduled" if spec.delay_seconds > 0 else "ready",
            available_at=self.now + timedelta(seconds=max(spec.delay_seconds, 0)),
            behind=timedelta(microseconds=place),
        )

    # --- claim -------------------------------------------------------------------------------

    def deal(self, queues: Sequence[str], limit: int, suspects: int) -> list[ModelJob]:
        """The jobs that a claim should give, in their order."""
        hands: dict[str, list[ModelJob]] = {}
        room: dict[str, float] = {}
        for name in queues:
            queue = self.queues[name]
            hands[name] = [] if queue.paused else self.order(name)
            running = len(self.in_state(name, "running"))
            room[name] = float("inf") if queue.max_running is None else queue.max_running - running
        dealt: list[ModelJob] = []
        progress = True
        while progress:
            progress = False
            for name, hand in hands.items():
                while hand and hand[0].suspect and suspects < 1:
                    hand.pop(0)
                if hand and room[name] > 0 and len(dealt) < limit:
                    job = hand.pop(0)
                    suspects -= job.suspect
                    room[name] -= 1
                    dealt.append(job)
                    progress = True
        return dealt

    def grant(self, job: ModelJob, lease_id: int, token: str, worker_id: int | None) -> None:
        job.state = "running"
        job.attempt += 1
        end = self.now + timedelta(seconds=LEASE_SECONDS)
        job.leases.append(ModelLease(lease_id, token, job.attempt, worker_id, end))

    def renew(self, lease_id: int, token: str, seconds: float) -> bool:
        found = self.lease(lease_id)
        if found is None or not self._holds(found[1], token):
            return False
        found[1].expires_at = self.now + timedelta(seconds=seconds)
        return True

    def _holds(self, lease: ModelLease, token: str) -> bool:
        return lease.token == token and lease.outcome is None and lease.expires_at > self.now

    # --- settle ------------------------------------------------------------------------------

    def settle(self, verb: str, lease_id: int, token: str, delay_seconds: float | None) -> Answer:
        """``verb`` is ack, nack, fatal, timed_out, snooze or release."""
        found = self.lease(lease_id)
        if found is None or found[1].token != token:
            return Answer(None, "", accepted=False)
        job, lease = found
        if not self._holds(lease, token):
            if verb == "ack" and lease.outcome == "acked":
                return Answer(job.id, job.state, accepted=True)
            lease.refused_verb = "nack" if verb in ("fatal", "timed_out") else verb
            return Answer(job.id, job.state, accepted=False)
        if verb == "ack":
            self._end(job, "acked", "succeeded")
            job.losses = 0
        elif verb == "release":
            self._uncharge(job, "released", "ready")
        elif verb == "snooze":
            self._uncharge(job, "snoozed", "scheduled")
            job.losses = 0
            self._wait(job, delay_seconds or 0.0)
        else:
            job.losses = 0
            outcome = {"nack": "failed"}.get(verb, verb)
            if verb == "fatal" or job.used == job.max_attempts:
                self._end(job, outcome, "dead")
            else:
                self._end(job, outcome, "retrying")
                backoff = min(BACKOFF_MAX_SECONDS, BACKOFF_BASE_SECONDS * 2 ** (job.used - 1))
                self._wait(job, backoff if delay_seconds is None else delay_seconds)
        return Answer(job.id, job.state, accepted=True)

    def _end(self, job: ModelJob, outcome: str, state: str) -> None:
        job.leases[-1].outcome = outcome
        self._become(job, state)

    def _uncharge(self, job: ModelJob, outcome: str, state: str) -> None:
        self._end(job, outcome, state)
        job.attempt -= 1

    def _become(self, job: ModelJob, state: str) -> None:
        job.state = state
        job.finished_at = self.now if state in FINISHED else None

    def _wait(self, job: ModelJob, seconds: float = 0.0) -> None:
        job.available_at = self.now + timedelta(seconds=seconds)
        job.behind = timedelta(0)

    # --- recover and promote -----------------------------------------------------------------

    def expire(self) -> list[ModelJob]:
        overdue = [job for job, lease in self.open_leases() if lease.expires_at <= self.now]
        return self._lose(overdue, "expired")

    def bury(self, worker_id: int) -> list[ModelJob]:
        orphans = [job for job, lease in self.open_leases() if lease.worker_id == worker_id]
        return self._lose(orphans, "lost")

    def _lose(self, jobs: list[ModelJob], outcome: str) -> list[ModelJob]:
        for job in jobs:
            job.losses += 1
            if job.used == job.max_attempts:
                self._end(job, outcome, "dead")
            else:
                self._end(job, outcome, "retrying" if job.suspect else "ready")
        return jobs

    def promote(self) -> dict[str, int]:
        due = [j for j in self.jobs.values() if j.state in WAITING and j.available_at <= self.now]
        for job in due:
            job.state = "ready"
        return dict(Counter(job.queue for job in due))

    # --- operate -----------------------------------------------------------------------------

    def _known(self, ids: Iterable[int], *states: str) -> list[ModelJob]:
        known = [self.jobs[i] for i in dict.fromkeys(ids) if i in self.jobs]
        return [job for job in known if job.state in states]

    def cancel(self, ids: Iterable[int]) -> list[int]:
        jobs = self._known(ids, *UNFINISHED)
        for job in jobs:
            if job.state == "running":
                job.leases[-1].outcome = "cancelled"
            self._become(job, "cancelled")
        return [job.id for job in jobs]

    def requeue_fits(self, ids: Iterable[int]) -> bool:
        wanted = Counter(job.queue for job in self._known(ids, "dead", "cancelled"))
        return all(n <= self.room(queue) for queue, n in wanted.items())

    def requeue(self, ids: Iterable[int]) -> list[int]:
        jobs = self._known(ids, "dead", "cancelled")
        for job in jobs:
            self._become(job, "ready")
            job.attempt_base = job.attempt
            job.losses = 0
            self._wait(job)
        return [job.id for job in jobs]

    def run_now(self, ids: Iterable[int]) -> list[int]:
        jobs = self._known(ids, *WAITING)
        for job in jobs:
            self._become(job, "ready")
            self._wait(job)
        return [job.id for job in jobs]

    def release_leases(self, ids: Iterable[int]) -> list[int]:
        jobs = self._known(ids, "running")
        for job in jobs:
            self._uncharge(job, "released", "ready")
        return [job.id for job in jobs]

    def set_priority(self, ids: Iterable[int], priority: int) -> list[int]:
        jobs = self._known(ids, "scheduled", "ready", "retrying")
        for job in jobs:
            job.priority = priority
            job.behind = timedelta(0)
        return [job.id for job in jobs]

    def discard(self, ids: Iterable[int]) -> list[int]:
        return self._delete(self._known(ids, "dead"))

    def prune(self, state: str, before: datetime) -> list[int]:
        return self._delete(
            [
                job
                for job in self.jobs.values()
                if job.state == state and job.finished_at is not None and job.finished_at < before
            ]
        )

    def _delete(self, jobs: list[ModelJob]) -> list[int]:
        for job in jobs:
            del self.jobs[job.id]
        return [job.id for job in jobs]
