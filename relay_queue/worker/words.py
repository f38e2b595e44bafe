"""What a loop says of a lease for its function, and when the function's own word is better."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from relay_queue.exceptions import TimedOut
from relay_queue.store.records import Claim, Settlement
from relay_queue.worker.executor import Finished

SHOWN_IDS = 20
"""The most jobs that a line of the log names."""


def shown_ids(job_ids: Collection[int]) -> str:
    """Return the ids of jobs for a line of the log, and how many more there are."""
    shown = ", ".join(map(str, sorted(job_ids)[:SHOWN_IDS]))
    more = len(job_ids) - SHOWN_IDS
    return shown if more <= 0 else f"{shown} and {more} more"


def released(claim: Claim) -> Settlement:
    """Hand a job back, uncharged."""
    return Settlement("release", claim.lease_id, claim.token)


def again(told: Settlement) -> Settlement:
    """Return the same words as a repetition, which the store takes as told once."""
    return replace(told, repeated=True)


def said_better(told: Settlement, finished: Mapping[int, Finished]) -> bool:
    """Whether the function itself has said what we were about to say for it, or has succeeded.

    Our word first would make its own look like a late return: it ended within its time limit or
    stopped at it, its ack is committed already, or it ended well while we were about to hand its job
    back.
    """
    own = finished.get(told.lease_id)
    if own is None:
        return False
    acked = told.verb == "release" and own.settlement.verb == "ack"
    in_time = told.timed_out and own.in_time
    return in_time or own.settlement.timed_out or own.settled is not None or acked


def timed_out(claim: Claim) -> Settlement:
    """Fail an attempt that ran past its time limit and has not ended."""
    return Settlement(
        "nack",
        claim.lease_id,
        claim.token,
        error=f"{TimedOut.__module__}.{TimedOut.__qualname__}",
        message=f"TimedOut: the attempt ran past its timeout of {claim.timeout_seconds:g} s",
        timed_out=True,
    )
