"""Rules on what clients and functions saw: nothing acked is lost, nothing runs that is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.history.evidence import MAYBE, TERMINAL, Evidence, Violation


def acked_is_kept(seen: Evidence) -> Iterator[Violation]:
    """An enqueue that was reported as committed is in the ledger, as the job that was named."""
    for label, enqueues in seen.enqueues.items():
        for enqueue in enqueues:
            if enqueue.fate != "ok":
                continue
            job_id = enqueue.answer["job"]
            if seen.added.get(job_id) != label:
                yield Violation("lost", f"{label} was acked as job {job_id}", job_id, label)
            elif job_id not in seen.ledger.jobs and not seen.deleted(job_id):
                yield Violation("lost", f"job {job_id} is gone before it ended", job_id, label)


def drained(seen: Evidence) -> Iterator[Violation]:
    """After the drain every job is in a terminal state."""
    for job in seen.ledger.jobs.values():
        if job.state not in TERMINAL:
            yield Violation("unfinished", f"job {job.id} is still {job.state}", job.id, job.label)


def only_enqueued(seen: Evidence) -> Iterator[Violation]:
    """Each job is the outcome of one enqueue that was not refused and not rolled back."""
    jobs = Counter(seen.added.values())
    for job_id, label in seen.added.items():
        asked = [e for e in seen.enqueues.get(label, ()) if e.fate in MAYBE]
        if len(asked) < jobs[label]:
            message = f"{jobs[label]} jobs of {len(asked)} enqueues of {label}"
            yield Violation("phantom", message, job_id, label)


def keys_hold(seen: Evidence) -> Iterator[Violation]:
    """At no time do two jobs of a queue hold one idempotency key."""
    held: Counter[tuple[str, str | None]] = Counter()
    held.update((j.queue, j.key) for j in seen.ledger.jobs.values() if j.key is not None)
    for job in seen.ledger.jobs.values():
        if held[job.queue, job.key] > 1:
            yield Violation("key", f"several jobs hold the key {job.key}", job.id, job.label)


def runs_are_leased(seen: Evidence) -> Iterator[Violation]:
    """A function runs only what was enqueued, under a committed lease, and once under each."""
    granted = {c.lease: c.job for c in seen.ledger.changes if c.kind == "lease" and c.old is None}
    runs = Counter(start["lease"] for start in seen.starts)
    for start in seen.starts:
        job_id, lease_id, label = start["job"], start["lease"], start["label"]
        if not any(e.fate in MAYBE for e in seen.enqueues.get(label, ())):
            message = f"{label} ran, and its enqueue did not commit"
            yield Violation("ran unenqueued", message, job_id, label)
        if granted.get(lease_id) != job_id or seen.added.get(job_id) != label:
            message = f"job {job_id} ran under lease {lease_id}, which was never committed"
            yield Violation("ran unleased", message, job_id, label)
        if runs[lease_id] > 1:
            message = f"lease {lease_id} gave {runs[lease_id]} runs"
            yield Violation("ran twice", message, job_id, label)
        lease = seen.ledger.leases.get(lease_id)
        if lease and (lease.attempt, lease.token) != (
            start["attempt"],
            start.get("token") or lease.token,
        ):
            message = f"lease {lease_id} is another attempt or token than the one that ran"
            yield Violation("ran unleased", message, job_id, label)


def acked_has_run(seen: Evidence) -> Iterator[Violation]:
    """What the ledger calls acked has run."""
    ran = {start["lease"] for start in seen.starts}
    for lease in seen.ledger.leases.values():
        if lease.outcome == "acked" and lease.id not in ran:
            yield Violation("acked unrun", f"lease {lease.id} was acked and never ran", lease.job)


def rings_tell_the_truth(seen: Evidence) -> Iterator[Violation]:
    """Whoever hears the bell of an enqueue finds its job."""
    for record in seen.records:
        if record["kind"] == "ring" and not record["visible"]:
            label = record["label"]
            message = f"the bell of {label} rang before its job could be seen"
            yield Violation("early ring", message, None, label)


def busy_means_not_begun(seen: Evidence) -> Iterator[Violation]:
    """A transaction that has begun is never refused as busy: its work would be lost half way."""
    for record in seen.records:
        if record["kind"] == "busy" and record["begun"]:
            yield Violation("busy", f"{record['actor']} was in a transaction and found it busy")


def nothing_breaks(seen: Evidence) -> Iterator[Violation]:
    """No verb meets rows that the tables' own constraints forbid."""
    for record in seen.records:
        if record["kind"] == "error":
            yield Violation("broken", f"{record['actor']} met {record['text']}")


RULES = (
    acked_is_kept,
    drained,
    only_enqueued,
    keys_hold,
    runs_are_leased,
    acked_has_run,
    rings_tell_the_truth,
    busy_means_not_begun,
    nothing_breaks,
)
