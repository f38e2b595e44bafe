"""All that is known at the end of a run, and what a rule says when it finds a contradiction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tests.history.journal import Operation, Record, operations
from tests.history.ledger import Change, Lease, Ledger

TERMINAL = frozenset({"succeeded", "dead", "cancelled"})
UNCHARGED = frozenset({"released", "unrun", "snoozed"})
MAYBE = ("ok", "unknown")
"""What may have been committed."""


class Violation(NamedTuple):
    """A promise that was not kept: by which rule, what was seen, and of which job."""

    rule: str
    message: str
    job: int | None = None
    label: str | None = None


@dataclass
class Evidence:
    """What clients and functions wrote down, and what the tables say.

    ``steady`` says that all clocks went forward at one pace, so that times of different owners can
    be compared. ``complete`` says that every settlement was written down, so that none may be found
    in the tables that nobody told. ``limits`` are capacity and running jobs by queue.
    """

    records: list[Record]
    ledger: Ledger
    steady: bool = True
    complete: bool = False
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def enqueues(self) -> dict[str, list[Operation]]:
        """All enqueues by label."""
        found: defaultdict[str, list[Operation]] = defaultdict(list)
        for operation in operations(self.records, "enqueue"):
            found[operation.asked["label"]].append(operation)
        return dict(found)

    @cached_property
    def settlements(self) -> dict[int, list[Operation]]:
        """All settlements by lease."""
        found: defaultdict[int, list[Operation]] = defaultdict(list)
        for operation in operations(self.records, "settle"):
            found[operation.asked["lease"]].append(operation)
        return dict(found)

    @cached_property
    def operated(self) -> list[Operation]:
        """All acts of operators."""
        return list(operations(self.records, "operate"))

    @cached_property
    def starts(self) -> list[Record]:
        """All starts of functions."""
        return [r for r in self.records if r["kind"] == "run" and r["phase"] == "start"]

    @cached_property
    def added(self) -> dict[int, str]:
        """Every job that was ever committed, with its label."""
        return self.ledger.added()

    @cached_property
    def moves(self) -> dict[int, list[Change]]:
        """The changes of each job's state."""
        return self.ledger.changes_of("job")

    @cached_property
    def lease_changes(self) -> dict[int, list[Change]]:
        """The grants and ends of each job's leases."""
        return self.ledger.changes_of("lease")

    @cached_property
    def leases(self) -> dict[int, list[Lease]]:
        """The leases of each job, oldest first."""
        return self.ledger.by_job()

    def deleted(self, job_id: int) -> bool:
        """Whether a job was deleted after it had ended."""
        return any(c.new == "deleted" and c.old in TERMINAL for c in self.moves.get(job_id, ()))

    def acts(self, job_id: int, *verbs: str) -> Iterator[Operation]:
        """Yield what operators may have done to a job with one of these verbs."""
        for act in self.operated:
            if act.asked["verb"] in verbs and act.fate in MAYBE:
                jobs = act.answer.get("jobs", act.asked["jobs"])
                if jobs is None or job_id in jobs:
                    yield act
