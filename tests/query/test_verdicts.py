"""The verdicts that the database finds are those that the ledger of each job says."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from django.db import connection

from relay_queue import store
from relay_queue.models import Job
from relay_queue.query import ledger
from relay_queue.verdict import Verdict, judge
from tests.store import actions
from tests.store.actions import Wall

JOBS = 5
STEPS = 60
SEEDS = (11, *range(11))
"""Of these, the first ends in the rarest verdict: see the test that counts on it."""


def live(seed: int, wall: Wall) -> None:
    """Let a few jobs live through whatever happens to jobs; ``seed`` decides."""
    draw = random.Random(seed)
    actions.enqueue_each(JOBS, max_attempts=4)
    actions.enqueue(run_after=actions.after(10**6))
    old: list[store.Claim] = []
    for _ in range(STEPS):
        worker_id = actions.register()
        held = actions.claim(draw.randint(0, 2), worker_id=worker_id, suspects=2)
        for claim in held:
            _end(draw, claim, wall)
        old += held
        if old and draw.random() < 0.5:  # whoever comes back late, or tells it twice
            _tell(draw.choice(["ack", "nack", "snooze", "release"]), draw.choice(old))
        if draw.random() < 0.1:
            actions.do(store.requeue, list(actions.rows(Job).values_list("pk", flat=True)))
        wall.advance(draw.choice([0.5, 20, 400]))
        actions.do(store.promote)


def _end(draw: random.Random, claim: store.Claim, wall: Wall) -> None:
    how = draw.choice(
        ["ack", "nack", "fatal", "snooze", "release", "lost", "expired", "cancel", "late", "open"]
    )
    if how in {"ack", "nack", "snooze", "release"}:
        _tell(how, claim)
    elif how == "fatal":
        actions.nack(claim, fatal=True)
    elif how == "lost":
        # One who dies loses all its jobs.
        actions.do(store.recover_dead, [actions.read_lease(claim.lease_id).worker_id])
    elif how == "cancel":
        actions.do(store.cancel, [claim.job_id])
    elif how in {"expired", "late"}:
        wall.advance(100)
        if how == "late":
            _tell("ack", claim)
        actions.do(store.recover_expired)


def _tell(verb: str, claim: store.Claim) -> None:
    seconds = 1.0 if verb in {"snooze", "nack"} else None
    # Every other release is that of a function which did not begin.
    unrun = verb == "release" and claim.lease_id % 2 == 0
    told = claim.settlement(verb, delay_seconds=seconds, unrun=unrun)  # type: ignore[arg-type]
    actions.settle([told])


@pytest.mark.parametrize("seed", SEEDS)
def test_filter_and_count_agree_with_the_ledger_of_every_job(wall: Wall, seed: int) -> None:
    live(seed, wall)
    jobs = actions.rows(Job).prefetch_related("leases")
    judged = {job.pk: judge(job.leases.all()) for job in jobs}
    for verdict in Verdict:
        found = set(
            ledger.filter_by_verdict(actions.rows(Job), verdict).values_list("pk", flat=True)
        )
        assert found == {pk for pk, said in judged.items() if said is verdict}, verdict
    assert {k: n for k, n in ledger.count_verdicts().items() if n} == Counter(judged.values())


def test_the_lives_of_the_test_above_end_in_every_verdict(wall: Wall) -> None:
    seen: set[Verdict] = set()
    for seed in SEEDS:
        live(seed, wall)
        seen |= {verdict for verdict, n in ledger.count_verdicts().items() if n}
        if seen == set(Verdict):
            return
        actions.empty()
    raise AssertionError(f"never seen: {set(Verdict) - seen}")


def test_a_job_that_was_only_handed_back_before_its_function_began_has_not_started(
    wall: Wall,
) -> None:
    job_id = actions.enqueue()
    for _ in range(2):
        claim = actions.claim_one()
        actions.settle([claim.settlement("release", unrun=True)])
    assert actions.outcomes(job_id) == ["unrun", "unrun"]
    story = ledger.story(job_id)
    assert (story.job.attempt, story.verdict) == (0, Verdict.NEVER_STARTED)
    assert story.detail == "handed back before the function began: 2"
    actions.ack(actions.claim_one())
    assert ledger.story(job_id).verdict is Verdict.RAN_ONCE


def test_an_unknown_verdict_is_an_error(engine: str) -> None:
    with pytest.raises(ValueError, match="twice"):
        ledger.filter_by_verdict(actions.rows(Job), "twice")


@pytest.mark.skipif(connection.vendor != "sqlite", reason="explains as SQLite does")
@pytest.mark.parametrize("statement", ["COUNT", "UNTROUBLED_RUNNING"])
def test_counting_reads_only_the_leases_that_were_not_acked(engine: str, statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {getattr(ledger, statement)}")
        steps = [row[3] for row in cursor.fetchall()]
    assert any("relay_lease_not_acked" in step for step in steps), steps
    assert not [
        s for s in steps if s.startswith("SCAN") and "INDEX" not in s and not s.startswith("SCAN t")
    ]
