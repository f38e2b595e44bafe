"""Pause, resume, rerank and prune."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError

from relay_queue import clock
from relay_queue.cli import prune
from relay_queue.models import Queue
from relay_queue.ranking import rank
from tests.store import actions

pytestmark = pytest.mark.django_db
Relay = Callable[..., Any]


def test_paused_queue_is_not_claimed_from_until_it_is_resumed(relay: Relay) -> None:
    actions.enqueue()
    assert "is paused" in relay("pause", "default").text
    assert actions.claim() == []
    assert relay("resume", "default", "--json").data == {"queue": "default", "paused": False}
    assert len(actions.claim()) == 1


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_unknown_queue_is_refused_with_the_known_ones(relay: Relay, verb: str) -> None:
    actions.enqueue()
    with pytest.raises(CommandError, match=r"no queue 'defualt'\. The queues are default"):
        relay(verb, "defualt")
    assert Queue.objects.count() == 1


@pytest.mark.parametrize(("text", "aging"), [("30", 30.0), ("strict", None)])
def test_rerank_changes_the_queue_and_its_jobs(
    relay: Relay, text: str, aging: float | None
) -> None:
    job_id = actions.enqueue(priority=5)
    answer = relay("rerank", "default", "--aging-seconds", text, "--json")
    assert answer.data == {"queue": "default", "aging_seconds": aging, "jobs": 1}
    job = actions.read(job_id)
    assert job.rank == rank(job.available_at, 5, aging)


@pytest.mark.parametrize("text", ["never", "0", "nan", "1e12"])
def test_rerank_refuses_an_aging_out_of_bounds(relay: Relay, text: str) -> None:
    actions.enqueue()
    with pytest.raises(CommandError, match=r"neither a number|not between"):
        relay("rerank", "default", "--aging-seconds", text)


@pytest.fixture
def old() -> dict[str, int]:
    """Make one job of each terminal state that finished 100 days ago, and one that just did."""
    then = clock.now() - timedelta(days=100)
    with clock.use(lambda: then):
        old = _finish_one_of_each()
    _finish_one_of_each()
    return old


def _finish_one_of_each() -> dict[str, int]:
    succeeded = actions.enqueue()
    actions.ack(actions.claim_one())
    dead = actions.enqueue()
    actions.nack(actions.claim_one(), fatal=True)
    cancelled = actions.enqueue()
    actions.cancel(cancelled)
    return {"succeeded": succeeded, "dead": dead, "cancelled": cancelled}


def left() -> dict[str, int]:
    return {state: n for (_, state), n in actions.real_counts().items()}


def test_prune_follows_the_settings_and_keeps_dead_letters(
    relay: Relay, old: dict[str, int]
) -> None:
    deleted = relay("prune", "--json").data["deleted"]
    assert (deleted["succeeded"], deleted["cancelled"]) == (1, 1)
    assert left() == {"succeeded": 1, "cancelled": 1, "dead": 2}
    actions.assert_counters_exact()


def test_prune_of_a_named_state_and_age(relay: Relay, old: dict[str, int]) -> None:
    assert relay("prune", "--state", "dead", "--older-than", "7d").text == "dead: 1 deleted\n"
    assert left() == {"succeeded": 2, "cancelled": 2, "dead": 1}


def test_age_alone_does_not_reach_dead_letters_that_are_kept(
    relay: Relay, old: dict[str, int]
) -> None:
    relay("prune", "--older-than", "0s")
    assert left() == {"dead": 2}


def test_prune_works_in_bounded_bites(
    relay: Relay, old: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "BATCH", 1)
    assert relay("prune", "--older-than", "0s", "--json").data["deleted"]["succeeded"] == 2


def test_prune_refuses_what_is_no_age(relay: Relay) -> None:
    with pytest.raises(CommandError, match=r"'soon' is no duration\. Write 7d"):
        relay("prune", "--older-than", "soon")
