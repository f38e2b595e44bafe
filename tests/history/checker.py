"""The checker: every rule over all evidence, and the story of the job where one was broken."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tests.history import clients, fencing, lives
from tests.history.evidence import Evidence, Violation
from tests.history.journal import Record
from tests.history.ledger import Change

RULES = (*clients.RULES, *fencing.RULES, *lives.RULES)

MOST_TOLD = 3
"""Violations whose stories are told: the rest is mostly their consequence."""


def check(seen: Evidence) -> list[Violation]:
    """Return every contradiction between what was seen outside and what the tables say."""
    return [violation for rule in RULES for violation in rule(seen)]


def report(seen: Evidence, violations: list[Violation], heading: str = "") -> str:
    """Tell what is wrong, and of the first jobs concerned what happened, step by step."""
    lines = [f"{heading}: {len(violations)} violations" if heading else "violations:"]
    lines += [f"  {v.rule}: {v.message}" for v in violations[:20]]
    told: set[Any] = set()
    for violation in violations:
        job_id = violation.job if violation.job is not None else _job_of(seen, violation.label)
        story = (job_id, None if job_id is not None else violation.label)
        if story in told or story == (None, None) or len(told) == MOST_TOLD:
            continue
        told.add(story)
        lines += ["", f"timeline of {violation.label or f'job {job_id}'}:"]
        lines += timeline(seen, job_id, violation.label)
    return "\n".join(lines)


def timeline(seen: Evidence, job_id: int | None, label: str | None = None) -> list[str]:
    """Return all that is known of one job in the order of time, a line each."""
    label = label or (seen.added.get(job_id) if job_id is not None else None)
    leases = {c.lease for c in seen.ledger.changes if c.job == job_id and c.lease is not None}
    told = [r for r in seen.records if _concerns(r, job_id, label, leases)]
    asked = {r["op"] for r in told if "op" in r}
    told = [r for r in seen.records if r in told or r.get("op") in asked]
    entries = [(datetime.fromisoformat(r["at"]), _told(r)) for r in told]
    entries += [
        (datetime.fromisoformat(c.at), _noted(c)) for c in seen.ledger.changes if c.job == job_id
    ]
    return [
        f"  {at:%H:%M:%S.%f} {text}" for at, text in sorted(entries, key=lambda entry: entry[0])
    ]


def _job_of(seen: Evidence, label: str | None) -> int | None:
    return next((job_id for job_id, name in seen.added.items() if name == label), None)


def _concerns(record: Record, job_id: int | None, label: str | None, leases: set[Any]) -> bool:
    if label is not None and record.get("label") == label:
        return True
    if job_id is not None and job_id in (record.get("jobs") or (record.get("job"),)):
        return True
    return record.get("lease") in leases


SHOWN_ELSEWHERE = ("at", "kind", "phase")


def _told(record: Record) -> str:
    facts = " ".join(f"{k}={v}" for k, v in record.items() if k not in SHOWN_ELSEWHERE)
    return f"{record['kind']} {record['phase']} {facts}"


def _noted(change: Change) -> str:
    of = f"lease {change.lease}" if change.lease is not None else f"job {change.job}"
    return f"    committed: {of} {change.old or 'new'} -> {change.new} ({change.detail})"
