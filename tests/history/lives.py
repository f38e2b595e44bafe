"""Rules on the life of a job: legal steps only, a budget that is kept, and nothing before its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import zip_longest

from tests.history.evidence import TERMINAL, UNCHARGED, Evidence, Violation
from tests.history.ledger import Change, moment

# Written from the design, not read from the code under test.
STEPS = {
    None: {"scheduled", "ready"},
    "scheduled": {"ready", "cancelled"},
    "ready": {"running", "cancelled"},
    "running": {"succeeded", "retrying", "scheduled", "ready", "dead", "cancelled"},
    "retrying": {"ready", "cancelled"},
    "succeeded": {"deleted"},
    "dead": {"ready", "deleted"},
    "cancelled": {"ready", "deleted"},
    "deleted": set(),
}

OVER = TERMINAL | {"deleted"}

ACTS = {"cancelled": ("cancel",), "ready": ("requeue",), "deleted": ("discard", "prune")}
"""Which acts of an operator stand behind a step that only an operator may take."""


def steps_are_legal(seen: Evidence) -> Iterator[Violation]:
    """A job takes legal steps from where it stood, and operators stand behind theirs."""
    for job_id, changes in seen.moves.items():
        state: str | None = None
        for change in changes:
            if change.old != state or change.new not in STEPS[change.old]:
                message = f"job {job_id} went from {change.old} to {change.new}"
                yield Violation("illegal step", message, job_id)
            state = change.new
        yield from _judge_acts(seen, job_id, changes)


def _judge_acts(seen: Evidence, job_id: int, changes: list[Change]) -> Iterator[Violation]:
    steps = Counter(c.new for c in changes if _is_operators(c))
    for new, verbs in ACTS.items():
        acts = list(seen.acts(job_id, *verbs))
        if steps[new] > len(acts):
            message = f"job {job_id} became {new} {steps[new]} times by {len(acts)} acts"
            yield Violation("unaudited", message, job_id)
        # Pruning names no jobs, so it need not have met this one.
        sure = sum(act.fate == "ok" and act.asked["jobs"] is not None for act in acts)
        if steps[new] < sure:
            message = f"{verbs[0]} of job {job_id} was answered as done, and is not in the ledger"
            yield Violation("act lost", message, job_id)


def _is_operators(change: Change) -> bool:
    if change.new == "ready":
        return change.old in TERMINAL
    return change.new in ACTS


def running_means_leased(seen: Evidence) -> Iterator[Violation]:
    """After each commit a job runs if and only if it has an open lease."""
    if not seen.complete:
        return  # only where the test makes the time do all changes of a commit have the same
    for job_id, changes in seen.moves.items():
        all_changes = [*changes, *seen.lease_changes.get(job_id, ())]
        all_changes.sort(key=lambda change: change.seq)
        running = leased = False
        for change, following in zip_longest(all_changes, all_changes[1:]):
            if change.kind == "job":
                running = change.new == "running"
            else:
                leased = change.new == "open"
            if running != leased and (following is None or following.at != change.at):
                state = "runs without" if running else "does not run and has"
                yield Violation("unleased", f"job {job_id} {state} an open lease", job_id)
                break


def limits_hold(seen: Evidence) -> Iterator[Violation]:
    """At no commit are more jobs of a queue unfinished, or running, than it allows."""
    queues = {
        job_id: seen.enqueues[label][0].asked.get("queue")
        for job_id, label in seen.added.items()
        if label in seen.enqueues
    }
    states: dict[int, str] = {}
    for change in seen.ledger.changes:
        queue = queues.get(change.job)
        if change.kind != "job" or queue not in seen.limits:
            continue
        states[change.job] = change.new
        now = [state for job_id, state in states.items() if queues[job_id] == queue]
        capacity, max_running = seen.limits[queue]
        running, unfinished = now.count("running"), sum(s not in OVER for s in now)
        if running > max_running:
            message = f"{running} jobs of queue {queue} were running; it allows {max_running}"
            yield Violation("running limit", message, change.job)
        if unfinished > capacity and change.old in {None, *OVER}:
            message = f"queue {queue} admitted {unfinished} jobs; its capacity is {capacity}"
            yield Violation("capacity", message, change.job)


def success_is_an_ack(seen: Evidence) -> Iterator[Violation]:
    """A job has succeeded if and only if its newest lease was acked."""
    for job in seen.ledger.jobs.values():
        leases = seen.leases.get(job.id, [])
        acked = [lease.id for lease in leases if lease.outcome == "acked"]
        wanted = [leases[-1].id] if job.state == "succeeded" and leases else []
        if acked != wanted or (job.state == "succeeded" and not leases):
            message = f"job {job.id} is {job.state}, and the acked leases are {acked}"
            yield Violation("acked", message, job.id)


def budgets_are_kept(seen: Evidence) -> Iterator[Violation]:
    """Every lease is charged but those handed back; a budget is kept until a requeue renews it."""
    limits = {label: enqueues[0].asked.get("limit") for label, enqueues in seen.enqueues.items()}
    for job in seen.ledger.jobs.values():
        charged, base = 0, 0
        limit = limits.get(job.label) or job.max_attempts
        changes = [*seen.lease_changes.get(job.id, ()), *seen.moves.get(job.id, ())]
        for change in sorted(changes, key=lambda change: change.seq):
            if change.kind == "job":
                base = charged if change.old in TERMINAL else base
            elif change.old is None:
                charged += 1
            elif change.new in UNCHARGED:
                charged -= 1
            if charged - base > limit:
                message = f"job {job.id} had {charged - base} charged attempts of {limit}"
                yield Violation("budget", message, job.id)
                break
        else:
            yield from _judge_numbers(seen, job.id, charged)


def _judge_numbers(seen: Evidence, job_id: int, charged: int) -> Iterator[Violation]:
    if seen.ledger.jobs[job_id].attempt != charged:
        message = (
            f"job {job_id} is at attempt {seen.ledger.jobs[job_id].attempt}, and {charged} "
            "of its leases are charged"
        )
        yield Violation("attempt", message, job_id)
    expected = 1
    for lease in seen.leases.get(job_id, ()):
        if lease.attempt != expected:
            message = f"lease {lease.id} says attempt {lease.attempt}; it was number {expected}"
            yield Violation("attempt", message, job_id)
        expected += lease.outcome not in UNCHARGED


def nothing_starts_early(seen: Evidence) -> Iterator[Violation]:
    """No job is claimed before it is due, and no function starts before its client's time."""
    if not seen.steady:
        return
    for change in seen.ledger.changes:
        lease = seen.ledger.leases.get(change.lease or 0)
        if change.kind != "lease" or change.old is not None or lease is None:
            continue
        due = moment(change.detail)
        if due is not None and lease.acquired_at < due:
            message = f"lease {lease.id} was granted at {lease.acquired_at}; the job was due {due}"
            yield Violation("before due", message, lease.job)
    dues = {
        label: datetime.fromisoformat(enqueues[0].asked["due"])
        for label, enqueues in seen.enqueues.items()
        if enqueues[0].asked.get("due")
    }
    for start in seen.starts:
        hurried = any(seen.acts(start["job"], "run_now", "requeue"))
        wanted = dues.get(start["label"])
        if wanted and not hurried and datetime.fromisoformat(start["at"]) < wanted:
            message = f"{start['label']} started at {start['at']}; its client said {wanted}"
            yield Violation("before due", message, start["job"])


def counters_are_exact(seen: Evidence) -> Iterator[Violation]:
    """The counters of each queue are what counting its jobs gives."""
    counted = Counter((job.queue, job.state) for job in seen.ledger.jobs.values())
    for place in sorted(counted.keys() | seen.ledger.counts.keys()):
        queue, state = place
        told, real = seen.ledger.counts.get(place, 0), counted[place]
        if told != real:
            message = f"queue {queue} counts {told} jobs that are {state}; there are {real}"
            yield Violation("counter", message)


RULES = (
    steps_are_legal,
    running_means_leased,
    limits_hold,
    success_is_an_ack,
    budgets_are_kept,
    nothing_starts_early,
    counters_are_exact,
)
