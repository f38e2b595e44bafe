"""Pause, resume, rerank and prune."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError

from relay_queue import clock
from relay_queue.cli import upkeep
from relay_queue.models import BulkAct, Queue, QueueMinute, Worker
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


def test_a_queue_is_deleted_if_it_has_no_job(relay: Relay) -> None:
    job_id = actions.enqueue(queue="mail")
    with pytest.raises(CommandError, match=r"queue 'mail' is not empty: it has 1 ready\. Let it"):
        relay("delete-queue", "mail")
    actions.cancel(job_id)
    relay("prune", "--older-than", "0s")
    assert relay("delete-queue", "mail", "--json").data == {"queue": "mail", "deleted": True}
    assert not Queue.objects.exists()
    with pytest.raises(CommandError, match="no queue 'mail'"):
        relay("delete-queue", "mail")


@pytest.mark.parametrize("verb", ["pause", "resume", "delete-queue"])
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
    monkeypatch.setattr(upkeep, "BATCH", 1)
    assert relay("prune", "--older-than", "0s", "--json").data["deleted"]["succeeded"] == 2


def test_prune_refuses_what_is_no_age(relay: Relay) -> None:
    with pytest.raises(CommandError, match=r"'soon' is no duration\. Write 7d"):
        relay("prune", "--older-than", "soon")


@pytest.mark.parametrize("age", ["30", " 30 ", "0", "1.5"])
def test_an_age_without_a_unit_is_refused_and_deletes_nothing(
    relay: Relay, old: dict[str, int], age: str
) -> None:
    written = age.strip()
    with pytest.raises(
        CommandError, match=rf"does not name its unit\. Write {written}d, {written}h"
    ):
        relay("prune", "--older-than", age)
    assert left() == {"succeeded": 2, "cancelled": 2, "dead": 2}


PRUNES: list[list[str]] = [
    [],
    ["--older-than", "0s"],
    ["--older-than", "30d"],
    ["--state", "dead", "--older-than", "7d"],
    ["--state", "dead"],
]


@pytest.mark.parametrize("arguments", PRUNES, ids=" ".join)
def test_a_dry_run_says_what_the_same_prune_deletes_and_deletes_nothing(
    relay: Relay, old: dict[str, int], arguments: list[str]
) -> None:
    _make_other_old_rows()
    before = _rows_of_all_tables()
    promised = relay("prune", "--dry-run", "--json", *arguments).data
    shown = relay("prune", "--dry-run", *arguments).text
    assert _rows_of_all_tables() == before
    deleted = relay("prune", "--json", *arguments).data["deleted"]
    assert promised == {"would_delete": deleted}
    assert all(f"{name}: {n} would be deleted\n" in shown for name, n in deleted.items())
    assert sum(before.values()) - sum(_rows_of_all_tables().values()) >= sum(deleted.values())


def _make_other_old_rows() -> None:
    """Make a stopped worker, a minute and bulk acts of long ago, and one act that still runs."""
    then = clock.now() - timedelta(days=1000)
    Worker.objects.create(
        incarnation="a" * 32,
        name="gone",
        host="here",
        pid=1,
        queues="",
        concurrency=1,
        started_at=then,
        heartbeat_at=then,
        stopped_at=then,
    )
    QueueMinute.objects.create(queue="default", worker_id=1, minute=then)
    for nonce, job_id, finished_at in [
        ("done", None, then),
        ("gone", 10**6, None),
        ("new", None, None),
    ]:
        BulkAct.objects.create(
            nonce=nonce,
            act="cancel",
            listing="jobs",
            time_zone="UTC",
            language="en",
            upper_id=1,
            user_id="1",
            username="ann",
            site="admin",
            job_id=job_id,
            created_at=then,
            finished_at=finished_at,
        )


def _rows_of_all_tables() -> dict[str, int]:
    models = apps.get_app_config("relay_queue").get_models()
    return {model.__name__: model._default_manager.count() for model in models}
