"""Rules on leases: they never overlap, and only who holds one may end it, and in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise

from tests.history.evidence import Evidence, Violation
from tests.history.journal import Operation
from tests.history.ledger import Lease

OUTCOMES = {
    "ack": frozenset({"acked"}),
    "nack": frozenset({"failed", "fatal", "timed_out"}),
    "snooze": frozenset({"snoozed"}),
    "release": frozenset({"released", "unrun"}),
}
"""How a lease ends by each word of its owner."""

BY_OWNER = frozenset().union(*OUTCOMES.values())
HANDED_BACK = OUTCOMES["release"]

TURN = timedelta(seconds=0.1)
"""More than passes in a transaction where the test makes the time."""


def leases_never_overlap(seen: Evidence) -> Iterator[Violation]:
    """A job's next lease is granted after the last one ended; what has ended stays as it is."""
    for job_id, changes in seen.lease_changes.items():
        held: int | None = None
        for change in changes:
            if change.old is None:
                if held is not None:
                    message = f"lease {change.lease} was granted while lease {held} was open"
                    yield Violation("overlap", message, job_id)
                held = change.lease
            elif change.old == "open" and change.lease == held:
                held = None
            else:
                message = f"lease {change.lease} went from {change.old} to {change.new}"
                yield Violation("ended twice", message, job_id)
    if seen.steady:
        yield from _times_never_overlap(seen)


def _times_never_overlap(seen: Evidence) -> Iterator[Violation]:
    for job_id, leases in seen.leases.items():
        for before, after in pairwise(leases):
            if before.ended_at is None or after.acquired_at < before.ended_at:
                message = (
                    f"lease {after.id} was acquired at {after.acquired_at}, before lease "
                    f"{before.id} ended at {before.ended_at}"
                )
                yield Violation("overlap", message, job_id)


def leases_end_in_time(seen: Evidence) -> Iterator[Violation]:
    """An owner's word counts before the lease expires, and only after that may others end it."""
    if seen.steady and seen.complete:
        yield from _judge_by_true_time(seen)
    deaths = {r["worker"] for r in seen.records if r["kind"] == "worker" and r["phase"] == "death"}
    for lease in seen.ledger.leases.values():
        if lease.ended_at is None:
            yield Violation("open", f"lease {lease.id} is open after the drain", lease.job)
            continue
        over = lease.ended_at >= lease.expires_at
        if lease.outcome in BY_OWNER - HANDED_BACK and over:  # an operator may release late
            message = f"lease {lease.id} was {lease.outcome} after it had expired"
            yield Violation("late", message, lease.job)
        if lease.outcome == "expired" and not over:
            message = f"lease {lease.id} was ended as expired at {lease.ended_at}, too early"
            yield Violation("early", message, lease.job)
        if lease.outcome == "lost" and deaths and lease.worker not in deaths:
            message = f"lease {lease.id} was ended as lost, and its owner lives"
            yield Violation("early", message, lease.job)


def _judge_by_true_time(seen: Evidence) -> Iterator[Violation]:
    """Where the test made the time, the moment of the commit is known whatever the row says."""
    for change in seen.ledger.changes:
        lease = seen.ledger.leases.get(change.lease or 0)
        if lease is None or change.kind != "lease" or change.new not in BY_OWNER - HANDED_BACK:
            continue
        if datetime.fromisoformat(change.at) > lease.expires_at + TURN:
            message = f"lease {lease.id} was {change.new} at {change.at}, after it had expired"
            yield Violation("late", message, lease.job)


def tokens_differ(seen: Evidence) -> Iterator[Violation]:
    """No two leases have the same token."""
    uses = Counter(lease.token for lease in seen.ledger.leases.values())
    for lease in seen.ledger.leases.values():
        if uses[lease.token] > 1:
            message = f"the token of lease {lease.id} has {uses[lease.token]} leases"
            yield Violation("token reused", message, lease.job)


def only_holders_settle(seen: Evidence) -> Iterator[Violation]:
    """What was answered to each settlement is what the ledger says of its lease."""
    for lease_id, settlements in seen.settlements.items():
        lease = seen.ledger.leases.get(lease_id)
        for told in settlements:
            if told.fate != "answered":
                continue
            if not told.answer["accepted"] and told.answer.get("changes"):
                message = f"a {told.asked['verb']} of lease {lease_id} was refused and took effect"
                yield Violation("refused took effect", message, told.asked.get("job"))
            if lease is not None:
                yield from _judge(lease, told)


def _judge(lease: Lease, told: Operation) -> Iterator[Violation]:
    verb = told.asked["verb"]
    holder = told.asked["token"] == lease.token
    if told.answer["accepted"]:
        if not holder:
            message = f"a {verb} of lease {lease.id} was accepted with another lease's token"
            yield Violation("wrong token", message, lease.job)
        if lease.outcome not in OUTCOMES[verb]:
            message = f"a {verb} of lease {lease.id} was accepted, and it is {lease.outcome}"
            yield Violation("answer lost", message, lease.job)
    elif holder and (lease.refused_at is None or not lease.refused_verb):
        message = f"a {verb} of lease {lease.id} was refused, and the ledger does not say so"
        yield Violation("refusal lost", message, lease.job)


def outcomes_were_told(seen: Evidence) -> Iterator[Violation]:
    """A lease ended by its owner was ended by a word that was told and not refused."""
    if not seen.complete:
        return
    for lease in seen.ledger.leases.values():
        if lease.outcome not in BY_OWNER:
            continue
        words = [
            told
            for told in seen.settlements.get(lease.id, ())
            if lease.outcome in OUTCOMES[told.asked["verb"]]
            and told.asked["token"] == lease.token
            and (told.fate == "unknown" or told.answer.get("accepted"))
        ]
        operated = lease.outcome == "released" and any(seen.acts(lease.job, "release_leases"))
        if not words and not operated:
            message = f"lease {lease.id} is {lease.outcome}, and no holder's word stands for it"
            yield Violation("untold", message, lease.job)


def reported_acks_are_kept(seen: Evidence) -> Iterator[Violation]:
    """A job whose ack was accepted has succeeded, for good."""
    for lease_id, settlements in seen.settlements.items():
        for told in settlements:
            accepted = told.fate == "answered" and told.answer["accepted"]
            if not accepted or told.asked["verb"] != "ack":
                continue
            job = seen.ledger.jobs.get(told.asked["job"])
            if job is None and seen.deleted(told.asked["job"]):
                continue
            if job is None or job.state != "succeeded":
                message = f"the ack of lease {lease_id} was accepted, and the job did not succeed"
                yield Violation("ack lost", message, told.asked["job"])


RULES = (
    leases_never_overlap,
    leases_end_in_time,
    tokens_differ,
    only_holders_settle,
    outcomes_were_told,
    reported_acks_are_kept,
)
