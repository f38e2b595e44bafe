"""Discard, release, run-now and priority change jobs; limits changes a queue."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError

from relay_queue import clock
from relay_queue.models import Job, Queue
from relay_queue.ranking import rank
from tests.store import actions

pytestmark = pytest.mark.django_db
Relay = Callable[..., Any]


def scheduled() -> int:
    return actions.enqueue(run_after=clock.now() + timedelta(hours=1))


def dead() -> int:
    job_id = actions.enqueue()
    actions.nack(actions.claim_one(), fatal=True)
    return job_id


def test_discard_deletes_dead_letters_and_nothing_else(relay: Relay) -> None:
    gone, ready = dead(), actions.enqueue()
    answer = relay("discard", gone, ready)
    assert (answer.code, answer.text.splitlines()) == (
        1,
        [f"Discarded 1 job: {gone}.", f"Skipped 1 job: {ready} is ready."],
    )
    assert not Job.objects.filter(pk=gone).exists()


def test_discard_of_several_needs_a_yes(relay: Relay) -> None:
    dead(), dead()
    with pytest.raises(CommandError, match="Discard 2 jobs"):
        relay("discard", "--queue", "default")
    assert relay("discard", "--queue", "default", "--yes").code == 0
    assert Job.objects.count() == 0


def test_release_takes_a_running_job_from_its_owner(relay: Relay) -> None:
    job_id = actions.enqueue()
    held = actions.claim_one()
    assert relay("release", job_id).text == f"Released 1 job: {job_id}.\n"
    job = actions.read(job_id)
    assert (job.state, job.attempt) == ("ready", 0)
    assert not actions.ack(held).accepted


def test_run_now_makes_what_waits_ready(relay: Relay) -> None:
    later, failed = scheduled(), actions.enqueue()
    actions.nack(actions.claim_one())
    assert relay("run-now", later, failed, "--json").data["changed"] == [later, failed]
    assert {actions.state(later), actions.state(failed)} == {"ready"}


def test_priority_is_changed_with_the_rank(relay: Relay) -> None:
    job_id = actions.enqueue()
    answer = relay("priority", job_id, "--to", "-5")
    assert answer.text == f"Gave priority -5 to 1 job: {job_id}.\n"
    job = actions.read(job_id)
    assert (job.priority, job.rank) == (-5, rank(job.available_at, -5, 60.0))


@pytest.mark.parametrize("to", ["101", "high"])
def test_priority_out_of_bounds_is_refused(relay: Relay, to: str) -> None:
    job_id = actions.enqueue()
    with pytest.raises(CommandError, match=r"between -100 and 100|invalid int"):
        relay("priority", job_id, "--to", to)


def test_limits_are_shown_and_changed_one_by_one(relay: Relay) -> None:
    actions.enqueue(queue="mail")
    assert relay("limits", "mail").text == "Queue mail: capacity no limit, max running no limit.\n"
    relay("limits", "mail", "--capacity", 20_000)
    answer = relay("limits", "mail", "--max-running", 0)
    assert answer.text == "Queue mail: capacity 20,000, max running 0.\n"
    answer = relay("limits", "mail", "--capacity", "none", "--json")
    assert answer.data == {"queue": "mail", "capacity": None, "max_running": 0}
    row = Queue.objects.get(name="mail")
    assert (row.capacity, row.max_running) == (None, 0)


@pytest.mark.parametrize(
    ("limit", "message"), [("-1", "between 0"), ("many", "neither a number nor none")]
)
def test_limits_out_of_bounds_are_refused(relay: Relay, limit: str, message: str) -> None:
    actions.enqueue()
    with pytest.raises(CommandError, match=message):
        relay("limits", "default", "--capacity", limit)
    assert Queue.objects.get(name="default").capacity is None


def test_limits_of_an_unknown_queue_are_refused(relay: Relay) -> None:
    with pytest.raises(CommandError, match="no queue 'mial'"):
        relay("limits", "mial", "--capacity", 5)
