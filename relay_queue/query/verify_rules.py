"""What can be wrong with a stored job, and what to do about each fault.

Pure: `check_job` is given a job and its leases as one read found them. Every rule here holds in each
committed state of the tables, so a history that the store wrote itself is never condemned. Leases
are ordered by id and not by their times: the wall clock may have stepped back between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from relay_queue.states import (
    KEPT_LEASES,
    LAST_OUTCOMES,
    TERMINAL,
    UNCHARGED,
    Outcome,
    State,
)

_DISK: Final = (
    "Stop the workers, copy the database to another disk, a file with its -wal file, and test the "
    "disk. Then restore the latest good copy, made by `relay backup` or by the server's own tool."
)
_HISTORY: Final = (
    "Only something other than Relay writes such rows. Find out what changed the tables by hand. "
)

ADVICE: Final[dict[str, str]] = {
    "log_torn": (
        "SQLite drops it when the database is next opened. A process or the power died while it "
        "was written; its commit was not reported, unless the disk lies about what it has stored. "
        "Run `relay verify` again: the fault should be gone. If it comes back, or if nothing died, "
        "test the disk: the last commit may be lost."
    ),
    "log_corrupt": (
        "SQLite drops everything from the damaged frame on, committed transactions included. "
        + _DISK
    ),
    "log_missing": (
        "Something removed the log after a crash, and with it the transactions that were committed "
        "last. If you still have the -wal file, stop everything, put it back beside the database "
        "and verify again. Otherwise they are lost: jobs may be missing or older than they were. "
        "Opening the database removes this trace of them."
    ),
    "database_corrupt": _DISK,
    "unreadable": ("The row cannot be read, so part of the database is damaged. " + _DISK),
    "foreign_key": _HISTORY + "Delete the rows that point nowhere, or restore a backup.",
    "checksum": (
        "A worker never runs this job: it goes to the dead letters when it is claimed. Enqueue "
        "its work again and discard it. If more jobs are named, test the disk."
    ),
    "unknown_state": _HISTORY + "No worker sees the job; restore a backup, or set a known state.",
    "missing_lease": _HISTORY + "`relay cancel` the job, then `relay requeue` it.",
    "stray_lease": (
        _HISTORY + "`relay recover` ends the lease once it has expired; then verify again."
    ),
    "two_open_leases": (
        "Two workers may run the job at once. " + _HISTORY + "Check that the index "
        "relay_lease_one_open exists, then `relay cancel` the job and `relay requeue` it."
    ),
    "overlapping_leases": (
        _HISTORY + "`relay recover` ends the older lease once it has expired; then verify again."
    ),
    "lease_outcome": _HISTORY + "Restore a backup if the ledger of this job matters.",
    "attempt": (
        _HISTORY + "The job may have run more or fewer times than it shows; look at it with "
        "`relay inspect --job`."
    ),
    "attempt_order": _HISTORY + "A lease of this job may be missing; see `relay inspect --job`.",
    "budget": _HISTORY + "The job has had too many attempts; `relay inspect --job` lists them.",
    "last_outcome": _HISTORY + "See `relay inspect --job` for what its attempts say.",
    "acked": (
        _HISTORY + "See `relay inspect --job` whether its work was done, and enqueue it again "
        "if not."
    ),
    "acked_late": (
        "The function's success was taken from an owner whose time was over, so another may have "
        "run the job too. " + _HISTORY
    ),
    "tables": "Run `manage.py migrate`, and check that RELAY['DATABASE'] names the right alias.",
    "finished_at": _HISTORY + "Pruning relies on this time; `relay inspect --job` shows the job.",
    "worker": (
        _HISTORY + "Nobody can prove the death of this worker: its leases end when they expire. "
        "Delete the row once the worker has stopped; a new one writes its own."
    ),
    "counter": (
        "Depth, capacity and max_running rely on this number. Run "
        "`manage.py relay recover --recount`, which counts the jobs again."
    ),
}
"""What to do, by the kind of fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: what kind, with which job and lease, and the way out."""

    kind: str
    message: str
    job_id: int | None = None
    lease_id: int | None = None

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind]


class JobRow(NamedTuple):
    """What the rules look at of a job. ``finished`` says whether it has a ``finished_at``."""

    id: int
    state: str
    attempt: int
    attempt_base: int
    max_attempts: int
    finished: bool


class LeaseRow(NamedTuple):
    """What the rules look at of a lease.

    ``ended`` says whether it has an ``ended_at``, ``late`` whether that lies after ``expires_at``.
    """

    id: int
    attempt: int
    ended: bool
    late: bool | None
    outcome: str | None


Leases = Sequence[LeaseRow]


def check_job(job: JobRow, leases: Leases) -> Iterator[Fault]:
    """Yield the faults of one job, given all its leases in order of id."""
    if job.state not in _STATES:
        yield Fault("unknown_state", f"job {job.id} is in state {job.state!r}", job.id)
        return
    for rule in _RULES:
        yield from rule(job, leases)


def _check_open_leases(job: JobRow, leases: Leases) -> Iterator[Fault]:
    """A running job has one open lease, any other has none, and only the newest may be open."""
    still_open = [lease for lease in leases if not lease.ended]
    if not still_open:
        if job.state == State.RUNNING:
            yield Fault("missing_lease", f"job {job.id} is running without an open lease", job.id)
        return
    if len(still_open) > 1:
        ids = ", ".join(str(lease.id) for lease in still_open)
        message = f"job {job.id} has {len(still_open)} open leases: {ids}"
        yield Fault("two_open_leases", message, job.id, still_open[0].id)
    elif still_open[0] is not leases[-1]:
        message = (
            f"lease {still_open[0].id} of job {job.id} is open, though the later lease "
            f"{leases[-1].id} has ended"
        )
        yield Fault("overlapping_leases", message, job.id, still_open[0].id)
    if job.state != State.RUNNING:
        message = f"job {job.id} is {job.state} and has the open lease {still_open[-1].id}"
        yield Fault("stray_lease", message, job.id, still_open[-1].id)


def _check_outcomes(job: JobRow, leases: Leases) -> Iterator[Fault]:
    """A lease that ended has a known outcome, an open one has none, and acks come in time."""
    for lease in leases:
        if bool(lease.ended) != (lease.outcome is not None):
            which = "ended with" if lease.ended else "open with"
            message = f"lease {lease.id} of job {job.id} is {which} outcome {lease.outcome!r}"
            yield Fault("lease_outcome", message, job.id, lease.id)
        elif lease.outcome not in _OUTCOMES:
            message = f"lease {lease.id} of job {job.id} has the unknown outcome {lease.outcome!r}"
            yield Fault("lease_outcome", message, job.id, lease.id)
        elif lease.outcome == Outcome.ACKED and lease.late:
            message = f"lease {lease.id} of job {job.id} was acked after it had expired"
            yield Fault("acked_late", message, job.id, lease.id)


def _check_attempts(job: JobRow, leases: Leases) -> Iterator[Fault]:
    """``attempt`` counts the charged leases, each lease knows its number, the budget is kept."""
    charged = _charged_and_gone(job, leases)
    for lease in leases:
        if lease.attempt != charged + 1:
            message = (
                f"lease {lease.id} of job {job.id} says attempt {lease.attempt}, though "
                f"{charged} charged before it make it attempt {charged + 1}"
            )
            yield Fault("attempt_order", message, job.id, lease.id)
        charged += lease.outcome not in _UNCHARGED
    if job.attempt != charged:
        message = f"job {job.id} is at attempt {job.attempt}, its charged leases are {charged}"
        yield Fault("attempt", message, job.id)
    if not job.attempt_base <= job.attempt <= job.attempt_base + job.max_attempts:
        message = (
            f"job {job.id} is at attempt {job.attempt}; its budget goes from {job.attempt_base} "
            f"to {job.attempt_base + job.max_attempts}"
        )
        yield Fault("budget", message, job.id)


def _charged_and_gone(job: JobRow, leases: Leases) -> int:
    """Return how many charged leases may be missing from the begin of a ledger.

    A finished job with a long ledger is pruned from its oldest lease on, in several transactions.
    An operator may put it back in between: the missing ones are then of an earlier budget.
    """
    if len(leases) < KEPT_LEASES:
        return 0
    missing = max(0, leases[0].attempt - 1)
    return missing if job.state in _TERMINAL or missing <= job.attempt_base else 0


def _check_end(job: JobRow, leases: Leases) -> Iterator[Fault]:
    """A terminal state has a time and fits the newest lease; only success has an ack, just one."""
    terminal = job.state in _TERMINAL
    if terminal != bool(job.finished):
        has = "no finished_at" if terminal else "a finished_at"
        yield Fault("finished_at", f"job {job.id} is {job.state} and has {has}", job.id)
    acked = [lease for lease in leases if lease.outcome == Outcome.ACKED]
    expected = 1 if job.state == State.SUCCEEDED else 0
    if len(acked) != expected:
        message = f"job {job.id} is {job.state} and has {len(acked)} acked leases, not {expected}"
        yield Fault("acked", message, job.id, acked[-1].id if acked else None)
    newest = leases[-1] if leases else None
    if not terminal or (newest is not None and not newest.ended):
        return  # an open lease of a finished job is another rule's business
    outcome = newest.outcome if newest else None
    if outcome not in LAST_OUTCOMES[State(job.state)]:
        message = f"job {job.id} is {job.state} after the outcome {outcome or 'no lease'}"
        yield Fault("last_outcome", message, job.id, newest.id if newest else None)


_RULES: Final[tuple[Callable[[JobRow, Leases], Iterator[Fault]], ...]] = (
    _check_open_leases,
    _check_outcomes,
    _check_attempts,
    _check_end,
)

# Plain strings: looking up a member of an enumeration costs more than the rules themselves.
_STATES: Final = frozenset(state.value for state in State)
_TERMINAL: Final = frozenset(state.value for state in TERMINAL)
_UNCHARGED: Final = frozenset(outcome.value for outcome in UNCHARGED)
_OUTCOMES: Final = frozenset({None, *(outcome.value for outcome in Outcome)})
