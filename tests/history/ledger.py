"""The tables of the queue, read by plain SQL: past Relay and past Django's models."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tests.history.journal import digest
from tests.history.witness import TABLE


class Job(NamedTuple):
    """A row of the job table."""

    id: int
    queue: str
    label: str
    key: str | None
    state: str
    attempt: int
    attempt_base: int
    max_attempts: int


class Lease(NamedTuple):
    """A row of the lease table; ``token`` is a digest."""

    id: int
    job: int
    attempt: int
    token: str
    worker: int | None
    acquired_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    outcome: str | None
    refused_at: datetime | None
    refused_verb: str


class Change(NamedTuple):
    """What the database noted of one committed change; see `tests.history.witness`."""

    seq: int
    at: str
    kind: str
    job: int
    lease: int | None
    old: str | None
    new: str
    detail: Any


@dataclass
class Ledger:
    """All that the tables say, and all changes that led there."""

    jobs: dict[int, Job] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def leases_of(self, job_id: int) -> list[Lease]:
        """Return the leases of a job, oldest first."""
        return [lease for lease in self.leases.values() if lease.job == job_id]

    def by_job(self) -> dict[int, list[Lease]]:
        """Return the leases of every job, oldest first."""
        found: dict[int, list[Lease]] = {job_id: [] for job_id in self.jobs}
        for lease in self.leases.values():
            found.setdefault(lease.job, []).append(lease)
        return found

    def changes_of(self, kind: str) -> dict[int, list[Change]]:
        """Return the changes of one kind by job, in the order of their commits."""
        found: defaultdict[int, list[Change]] = defaultdict(list)
        for change in self.changes:
            if change.kind == kind:
                found[change.job].append(change)
        return dict(found)

    def added(self) -> dict[int, str]:
        """Return every job that was ever committed with its label, deleted ones included."""
        return {
            change.job: label_of(change.detail)
            for change in self.changes
            if change.kind == "job" and change.old is None
        }


def label_of(payload: str) -> str:
    """Return the argument ``label``, by which a client knows its call again."""
    return str(json.loads(payload)["kwargs"]["label"])


def moment(value: str | datetime | None) -> datetime | None:
    """Parse a time of the tables."""
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return None if value is None else datetime.fromisoformat(value).replace(tzinfo=UTC)


JOBS = """
    SELECT id, queue, payload, idempotency_key, state, attempt, attempt_base, max_attempts
    FROM relay_queue_job ORDER BY id
"""
LEASES = """
    SELECT id, job_id, attempt, token, worker_id, acquired_at, expires_at, ended_at, outcome,
           refused_at, refused_verb
    FROM relay_queue_lease ORDER BY id
"""
COUNTS = (
    "SELECT queue, state, SUM(n) FROM relay_queue_queuecount GROUP BY queue, state ORDER BY 1, 2"
)
CHANGES = f"SELECT seq, at, kind, job, lease, old, new, detail FROM {TABLE} ORDER BY seq"


def read(connection: Any) -> Ledger:
    """Read everything, from a connection of the database's own driver."""
    jobs = [Job(row[0], row[1], label_of(row[2]), *row[3:]) for row in connection.execute(JOBS)]
    leases = [_lease(row) for row in connection.execute(LEASES)]
    return Ledger(
        jobs={job.id: job for job in jobs},
        leases={lease.id: lease for lease in leases},
        counts={(queue, state): int(n) for queue, state, n in connection.execute(COUNTS) if n},
        changes=[Change(*row) for row in connection.execute(CHANGES)],
    )


def _lease(row: tuple[Any, ...]) -> Lease:
    lease_id, job_id, attempt, token, worker_id, *times, outcome, refused_at, refused_verb = row
    acquired_at, expires_at, ended_at = (moment(value) for value in times)
    assert acquired_at is not None
    assert expires_at is not None
    return Lease(
        lease_id,
        job_id,
        attempt,
        digest(token),
        worker_id,
        acquired_at,
        expires_at,
        ended_at,
        outcome,
        moment(refused_at),
        refused_verb,
    )
