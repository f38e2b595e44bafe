"""What is promised of each row, what was observed, and what came of it.

Everything else that tells the failure table is held to these texts by a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

KEPT: Final = "kept"
DIFFERS: Final = "differs"
NOT_APPLICABLE: Final = "not applicable"

Value = str | int | float | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Promise:
    """One row: what fails, and what is promised then.

    ``not_on_server`` says why a row says nothing of a queue that is on PostgreSQL, if so.
    """

    failure: str
    promise: str
    not_on_server: str = ""


PROMISES: Final = {
    "F1": Promise(
        "Worker dies before the side effect",
        "Its lease ends; another worker runs the job",
    ),
    "F2": Promise(
        "Worker dies after the side effect, before the ack",
        "The job runs again; the ledger shows attempt 1 as *lost, effect unknown*",
    ),
    "F3": Promise(
        "Ack arrives after the lease expired",
        "Refused by expiry and token; nothing changes; the refusal is recorded on that attempt",
    ),
    "F4": Promise(
        "Old worker returns after another claimed the job",
        "Its fencing token is refused, and recorded",
    ),
    "F5": Promise(
        "Process dies inside a transaction",
        "All of the transition is there, or none",
    ),
    "F6": Promise(
        "Machine or all workers restart with leases open",
        "Leases of dead owners end at once: ready again if attempts remain, else dead",
    ),
    "F7": Promise(
        "Job keeps failing",
        "Each back-off is stored before the worker moves on; exhausted jobs are dead letters "
        "until an operator acts",
    ),
    "F8": Promise(
        "Work arrives faster than it is done",
        "Depth grows on disk; leases, memory and threads stay bounded; a queue with a capacity "
        "refuses with `QueueFull`",
    ),
    "F9": Promise(
        "Function hangs past its timeout",
        "Its token is void and the job is retried elsewhere; the late result is refused; a "
        "process whose slots are all stuck is replaced",
    ),
    "F10": Promise(
        "Job is cancelled while it runs",
        "Cancelled durably at once; the function sees a flag; its late result is refused",
    ),
    "F11": Promise(
        "Worker is told to stop",
        "It claims nothing more, finishes what it holds within the timeout, and hands back the "
        "rest uncharged",
    ),
    "F12": Promise(
        "Payload was damaged on disk",
        "Checksum mismatch: the job goes dead with the reason, never to a function",
    ),
    "F13": Promise(
        "Database file or log has a torn tail or a flipped bit",
        "SQLite drops the unfinished tail; `relay verify` names what is wrong and exits 1",
        not_on_server="a server guards its files and its log itself; pg_amcheck and its data "
        "checksums find what is wrong with them",
    ),
    "F14": Promise(
        "Disk full, or the database locked by someone else",
        "No outcome is forgotten: the worker keeps it and retries; after an I/O error the "
        "process ends and is replaced",
    ),
    "F15": Promise(
        "System clock jumps",
        "No job is lost or runs under two valid tokens; timers inside a process use the "
        "monotonic clock",
    ),
}
"""By the number of the row, in the order of the table. Markdown, as in the documents."""


# -- what was observed


@dataclass(frozen=True, slots=True)
class Observation:
    """``found`` and ``promised`` are in words; ``held`` says whether the one fits the other."""

    what: str
    found: str
    promised: str
    held: bool

    def __str__(self) -> str:
        """Say what was found, and what should have been if that is something else."""
        missed = "" if self.held else f" (promised: {self.promised})"
        return f"{self.what}: {self.found}{missed}"

    def as_data(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def equal(what: str, found: Value | None, promised: Value) -> Observation:
    """Observe something that must be just this."""
    return Observation(what, _words(found), _words(promised), found == promised)


def at_most(what: str, found: float, most: float) -> Observation:
    """Observe a number that must not be larger."""
    return Observation(what, _words(found), f"at most {_words(most)}", found <= most)


def at_least(what: str, found: float, least: float) -> Observation:
    """Observe a number that must not be smaller."""
    return Observation(what, _words(found), f"at least {_words(least)}", found >= least)


def contains(what: str, found: str, part: str) -> Observation:
    """Observe a text that must have a part; only its first line is kept."""
    shown = found.strip().partition("\n")[0] or "nothing"
    return Observation(what, shown, f"… {part} …", part in found)


def untried(what: str, why: str) -> Observation:
    """Say that something cannot be tried on this system, so that its absence is seen."""
    return Observation(what, f"not tried, {why}", "", True)


def _words(value: Value | None) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return value or "nothing"
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) or "none"


# -- what came of a row


@dataclass(frozen=True, slots=True)
class Result:
    """``fault`` says why the row could not be looked at to its end; ``log`` is for a row that differs.

    ``reason`` says why the row was not executed at all, since it does not apply.
    """

    row: str
    observed: Sequence[Observation] = ()
    fault: str = ""
    seconds: float = 0.0
    log: Sequence[str] = field(default_factory=list)
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Say in a word or two what came of it. To have seen nothing is not enough."""
        if self.reason:
            return NOT_APPLICABLE
        kept = self.observed and not self.fault and all(o.held for o in self.observed)
        return KEPT if kept else DIFFERS

    def as_data(self) -> dict[str, Any]:
        """Return it as plain values, with the words of the table."""
        promise = PROMISES[self.row]
        return {
            "row": self.row,
            "failure": promise.failure,
            "promise": promise.promise,
            "observed": [observation.as_data() for observation in self.observed],
            "verdict": self.verdict,
            "reason": self.reason,
            "fault": self.fault,
            "seconds": round(self.seconds, 1),
            "log": list(self.log),
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Result:
        """Return what `as_data` had; the verdict is judged again."""
        observed = [Observation(**values) for values in data["observed"]]
        return cls(
            data["row"], observed, data["fault"], data["seconds"], data["log"], data["reason"]
        )
