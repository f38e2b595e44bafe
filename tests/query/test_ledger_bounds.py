"""Whatever reads the attempts of one job is bounded in leases: a job may have a hundred thousand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.db.models.signals import post_init

from relay_queue import store
from relay_queue.models import Job, Lease
from relay_queue.query import ledger
from relay_queue.results import MOST_ATTEMPTS, MOST_LEASES, stored_result
from tests.store.actions import Wall, ack, add_leases, claim_one, do, enqueue, nack, rows

LONG = 100_000
TASK = "tests.tasks.noop"

pytestmark = pytest.mark.usefixtures("wall")


@pytest.fixture
def made() -> Iterator[list[Lease]]:
    """The leases that were read from the table, one entry each."""
    read: list[Lease] = []

    def note(instance: Lease, **_: Any) -> None:
        read.append(instance)

    post_init.connect(note, sender=Lease)
    yield read
    post_init.disconnect(note, sender=Lease)


@pytest.mark.parametrize(("outcome", "verdict"), [("snoozed", "repeated"), ("failed", "repeated")])
def test_the_story_of_a_job_reads_its_newest_leases_and_says_how_many_there_are(
    outcome: str, verdict: str, made: list[Lease]
) -> None:
    job_id = enqueue()
    add_leases(job_id, LONG, outcome)
    story = ledger.story(job_id)
    assert len(made) <= ledger.MOST_SHOWN + 1
    ids = list(rows(Lease).order_by("id").values_list("id", flat=True))
    assert [lease.pk for lease in story.leases] == ids[-ledger.MOST_SHOWN :]
    assert story.older == ledger.MOST_COUNTED - ledger.MOST_SHOWN
    assert ledger.counted(story.older) == "9,900 or more"
    assert story.verdict == verdict


def test_the_verdict_is_on_all_leases_though_few_are_read() -> None:
    job_id = enqueue()
    add_leases(job_id, 1, "lost")
    add_leases(job_id, 1, "failed")
    assert ledger.story(job_id).verdict == "interrupted"
    rows(Lease).filter(outcome="failed").delete()
    add_leases(job_id, 2 * ledger.MOST_SHOWN, "released")
    story = ledger.story(job_id)
    assert (story.older, story.verdict) == (ledger.MOST_SHOWN + 1, "interrupted")
    assert ledger.counted(story.older) == "101"


def test_a_short_ledger_is_shown_whole() -> None:
    job_id = enqueue()
    add_leases(job_id, ledger.MOST_SHOWN, "failed")
    story = ledger.story(job_id)
    assert (len(story.leases), story.older) == (ledger.MOST_SHOWN, 0)


def test_inspect_tells_the_newest_attempts_and_that_there_are_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job_id = enqueue()
    add_leases(job_id, ledger.MOST_SHOWN + 7)
    call_command("relay", "inspect", "--job", str(job_id))
    assert "The newest 100 attempts; 7 older ones." in capsys.readouterr().out
    call_command("relay", "inspect", "--job", str(job_id), "--json")
    told = json.loads(capsys.readouterr().out)
    assert (len(told["leases"]), told["older_leases"]) == (ledger.MOST_SHOWN, 7)


def test_a_result_reads_the_newest_charged_attempts_and_counts_the_others(
    made: list[Lease], wall: Wall
) -> None:
    job_id = enqueue(task=TASK, max_attempts=5)
    add_leases(job_id, LONG, "failed")
    nack(claim_one(), error="builtins.KeyError", delay_seconds=0.0)
    do(store.promote)
    made.clear()
    result = stored_result(str(job_id))
    assert len(made) <= MOST_ATTEMPTS
    assert (len(result.errors), result.attempts) == (MOST_ATTEMPTS, LONG + 1)
    assert result.errors[-1].exception_class_path == "builtins.KeyError"


def test_a_result_looks_past_attempts_that_were_not_charged(made: list[Lease], wall: Wall) -> None:
    job_id = enqueue(task=TASK, max_attempts=5)
    nack(claim_one(), error="builtins.KeyError", delay_seconds=0.0)
    add_leases(job_id, MOST_LEASES // 2)
    do(store.promote)
    wall.advance(5)
    ack(claim_one())
    made.clear()
    result = stored_result(str(job_id))
    assert (len(result.errors), result.attempts) == (1, 2)
    assert len(made) <= MOST_ATTEMPTS + 2
    assert result.last_attempted_at == wall.now


def test_jobs_are_judged_alike_by_one_lease_more_than_enough() -> None:
    for outcomes in (["snoozed"], ["snoozed"] * 2, ["snoozed", "failed", "lost"]):
        job_id = enqueue()
        for outcome in outcomes:
            add_leases(job_id, 1, outcome)
    found = ledger.annotate_verdict(rows(Job)).order_by("id").values_list("verdict", flat=True)
    assert list(found) == ["once", "repeated", "repeated"]
