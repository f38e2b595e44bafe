"""Each rule of the checker is silent on a sound history, and speaks when one fact of it is changed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.history.checker import check, report, timeline
from tests.history.evidence import Evidence
from tests.history.journal import Journal, Record, digest, operations
from tests.history.ledger import Change, Job, Lease, Ledger

START = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
PAYLOAD = '{"args":[],"kwargs":{"label":"call"}}'


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def record(seconds: float, kind: str, phase: str = "", **facts: Any) -> Record:
    return {"at": at(seconds).isoformat(), "kind": kind, "phase": phase, **facts}


def sound() -> Evidence:
    """One job: its first owner dies, the second acks, and the first comes back late."""
    lost = Lease(1, 1, 1, digest("one"), 7, at(1), at(61), at(2), "lost", at(5), "ack")
    acked = Lease(2, 1, 2, digest("two"), 8, at(3), at(63), at(4), "acked", None, "")
    changes: list[tuple[float, str, int | None, str | None, str, Any]] = [
        (0, "job", None, None, "ready", PAYLOAD),
        (1, "job", None, "ready", "running", 1),
        (1, "lease", 1, None, "open", "2026-01-01 12:00:00"),
        (2, "lease", 1, "open", "lost", None),
        (2, "job", None, "running", "ready", 1),
        (3, "job", None, "ready", "running", 2),
        (3, "lease", 2, None, "open", "2026-01-01 12:00:00"),
        (4, "lease", 2, "open", "acked", None),
        (4, "job", None, "running", "succeeded", 2),
    ]
    ledger = Ledger(
        jobs={1: Job(1, "mail", "call", None, "succeeded", 2, 0, 3)},
        leases={1: lost, 2: acked},
        counts={("mail", "succeeded"): 1},
        changes=[
            Change(seq, at(when).isoformat(), kind, 1, lease, old, new, detail)
            for seq, (when, kind, lease, old, new, detail) in enumerate(changes, 1)
        ],
    )
    run = {"job": 1, "label": "call"}
    ack = {"verb": "ack", "job": 1}
    records = [
        record(
            0,
            "enqueue",
            "invoke",
            op="e",
            label="call",
            queue="mail",
            limit=3,
            due=at(0).isoformat(),
        ),
        record(0, "enqueue", "ok", op="e", job=1),
        record(0, "ring", label="call", visible=True),
        record(1, "run", "start", lease=1, attempt=1, token=digest("one"), **run),
        record(1, "worker", "death", worker=7),
        record(3, "run", "start", lease=2, attempt=2, token=digest("two"), **run),
        record(4, "settle", "told", op="a", lease=2, token=digest("two"), **ack),
        record(4, "settle", "answered", op="a", accepted=True, reason="", changes=2),
        record(5, "settle", "told", op="b", lease=1, token=digest("one"), **ack),
        record(5, "settle", "answered", op="b", accepted=False, reason="lost", changes=0),
        record(6, "busy", begun=False, actor="worker"),
    ]
    return Evidence(records, ledger, steady=True, complete=True, limits={"mail": (1, 1)})


def without(seen: Evidence, **facts: Any) -> None:
    """Forget the records that have these facts."""
    seen.records = [r for r in seen.records if any(r.get(k) != v for k, v in facts.items())]


def tell(seen: Evidence, op: str, which: str, /, **facts: Any) -> None:
    """Change one record."""
    (found,) = [r for r in seen.records if r.get("op") == op and r["phase"] == which]
    found.update(facts)


def job(seen: Evidence, **facts: Any) -> None:
    seen.ledger.jobs[1] = seen.ledger.jobs[1]._replace(**facts)


def lease(seen: Evidence, lease_id: int, **facts: Any) -> None:
    seen.ledger.leases[lease_id] = seen.ledger.leases[lease_id]._replace(**facts)


def change(seen: Evidence, seq: int, **facts: Any) -> None:
    seen.ledger.changes[seq - 1] = seen.ledger.changes[seq - 1]._replace(**facts)


def add(seen: Evidence, *records: Record) -> None:
    seen.records += records


def twin(seen: Evidence) -> None:
    """Let a second job hold the first one's key."""
    job(seen, key="key")
    seen.ledger.jobs[2] = seen.ledger.jobs[1]._replace(id=2)


def cancelled(seen: Evidence) -> None:
    """Let the job end as cancelled, by nobody's act."""
    change(seen, 9, new="cancelled")
    job(seen, state="cancelled")


BROKEN: list[tuple[str, Callable[[Evidence], Any]]] = [
    ("lost", lambda s: tell(s, "e", "ok", job=2)),
    ("lost", lambda s: s.ledger.jobs.clear()),
    ("unfinished", lambda s: job(s, state="retrying")),
    ("phantom", lambda s: tell(s, "e", "ok", phase="nothing")),
    ("phantom", lambda s: without(s, op="e")),
    ("key", twin),
    ("ran unenqueued", lambda s: tell(s, "e", "ok", phase="nothing")),
    ("ran unleased", lambda s: s.records[3].update(lease=9)),
    ("ran unleased", lambda s: s.records[3].update(token=digest("two"))),
    ("ran unleased", lambda s: s.records[3].update(attempt=2)),
    ("ran twice", lambda s: add(s, s.records[3])),
    ("acked unrun", lambda s: s.records.pop(5)),
    ("early ring", lambda s: s.records[2].update(visible=False)),
    ("busy", lambda s: s.records[-1].update(begun=True)),
    ("broken", lambda s: add(s, record(7, "error", actor="worker", text="IntegrityError"))),
    ("overlap", lambda s: s.ledger.changes.pop(3)),
    ("overlap", lambda s: lease(s, 2, acquired_at=at(1.5))),
    ("ended twice", lambda s: change(s, 4, old="cancelled")),
    ("open", lambda s: lease(s, 2, ended_at=None, outcome=None)),
    ("late", lambda s: lease(s, 2, expires_at=at(4))),
    ("late", lambda s: change(s, 8, at=at(70).isoformat())),
    ("early", lambda s: lease(s, 1, outcome="expired")),
    ("early", lambda s: s.records[4].update(worker=8)),
    ("token reused", lambda s: lease(s, 1, token=digest("two"))),
    ("refused took effect", lambda s: tell(s, "b", "answered", changes=1)),
    ("wrong token", lambda s: tell(s, "a", "told", token=digest("one"))),
    ("answer lost", lambda s: lease(s, 2, outcome="failed")),
    ("refusal lost", lambda s: lease(s, 1, refused_at=None)),
    ("untold", lambda s: without(s, op="a")),
    ("untold", lambda s: tell(s, "a", "answered", accepted=False)),
    ("ack lost", lambda s: job(s, state="dead")),
    ("illegal step", lambda s: change(s, 9, old="ready")),
    ("illegal step", lambda s: change(s, 6, new="succeeded")),
    ("unaudited", cancelled),
    (
        "act lost",
        lambda s: add(
            s,
            record(4, "operate", "invoke", op="c", verb="cancel", jobs=[1]),
            record(4, "operate", "ok", op="c", jobs=[1]),
        ),
    ),
    ("unleased", lambda s: change(s, 8, at=at(4.5).isoformat())),
    ("running limit", lambda s: s.limits.update(mail=(1, 0))),
    ("capacity", lambda s: s.limits.update(mail=(0, 1))),
    ("acked", lambda s: job(s, state="dead")),
    ("budget", lambda s: tell(s, "e", "invoke", limit=1)),
    ("attempt", lambda s: job(s, attempt=1)),
    ("attempt", lambda s: lease(s, 2, attempt=1)),
    ("before due", lambda s: tell(s, "e", "invoke", due=at(2).isoformat())),
    ("before due", lambda s: change(s, 3, detail="2026-01-01 12:00:01.5")),
    ("counter", lambda s: s.ledger.counts.update({("mail", "ready"): 1})),
    ("counter", lambda s: s.ledger.counts.clear()),
]


def test_a_sound_history_breaks_no_rule() -> None:
    assert check(sound()) == []


@pytest.mark.parametrize(
    ("rule", "spoil"), BROKEN, ids=[f"{n}-{rule}" for n, (rule, _) in enumerate(BROKEN)]
)
def test_one_changed_fact_breaks_the_rule(rule: str, spoil: Callable[[Evidence], Any]) -> None:
    seen = sound()
    spoil(seen)
    violations = check(seen)
    assert rule in {violation.rule for violation in violations}
    assert rule in report(seen, violations)


def test_times_of_different_owners_are_compared_only_if_their_clocks_agree() -> None:
    seen = sound()
    seen.steady = False
    lease(seen, 2, acquired_at=at(1.5))
    tell(seen, "e", "invoke", due=at(2).isoformat())
    assert check(seen) == []


def test_the_timeline_of_a_job_is_in_order_and_has_both_sides() -> None:
    lines = timeline(sound(), 1)
    moments = [line.split()[0] for line in lines]
    assert moments == sorted(moments)
    assert sum("committed" in line for line in lines) == 9
    assert any("settle answered" in line and "accepted=False" in line for line in lines)


def test_what_was_asked_and_never_answered_has_an_unknown_outcome(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal"))
    assert journal.records() == []
    journal.note("enqueue", "invoke", op="1", label="a")
    journal.note("enqueue", "invoke", op="2", label="b")
    journal.note("enqueue", "ok", op="2", job=5)
    told = list(operations(journal.records(), "enqueue"))
    assert [(o.asked["label"], o.fate, o.answer.get("job")) for o in told] == [
        ("a", "unknown", None),
        ("b", "ok", 5),
    ]
