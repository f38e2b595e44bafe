"""The failure table in words. Everything else that tells it is held to these texts by a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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
