"""Requeue and cancel change named or found jobs, and say what they skipped."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from django.core.management import CommandError

from relay_queue import operations, store
from relay_queue.cli import operate
from tests.store import actions

pytestmark = pytest.mark.django_db
Relay = Callable[..., Any]


def dead(queue: str = "default", count: int = 1) -> list[int]:
    job_ids = actions.enqueue_each(count, queue=queue)
    for _ in job_ids:
        actions.nack(actions.claim_one(queue), fatal=True)
    return job_ids


def test_named_dead_job_is_ready_again(relay: Relay) -> None:
    (job_id,) = dead()
    answer = relay("requeue", job_id)
    assert answer.code == 0
    assert answer.text == f"Requeued 1 job: {job_id}.\n"
    assert actions.state(job_id) == "ready"


def test_named_job_in_another_state_is_skipped_with_exit_code_1(relay: Relay) -> None:
    (job_id,) = dead()
    ready = actions.enqueue()
    answer = relay("requeue", job_id, ready)
    assert answer.code == 1
    assert f"Requeued 1 job: {job_id}." in answer.text
    assert f"Skipped 1 job: {ready} is ready." in answer.text


def test_named_job_that_is_not_there_gives_exit_code_1(relay: Relay) -> None:
    answer = relay("requeue", 404, "--json")
    assert answer.code == 1
    assert answer.data["missing"] == [404]


def test_all_dead_needs_a_yes_where_nobody_can_answer(relay: Relay) -> None:
    job_ids = dead(count=3)
    with pytest.raises(CommandError, match="Requeue 3 jobs"):
        relay("requeue", "--all-dead")
    assert {actions.state(job_id) for job_id in job_ids} == {"dead"}
    assert relay("requeue", "--all-dead", "--yes").code == 0
    assert {actions.state(job_id) for job_id in job_ids} == {"ready"}


def test_filters_and_limit_narrow_the_selection(relay: Relay) -> None:
    mail, _other = dead("mail", 3), dead("other", 1)
    answer = relay("requeue", "--queue", "mail", "--limit", 2, "--yes", "--json")
    assert answer.data["changed"] == mail[:2]
    assert relay("requeue", "--task", "no.such.task", "--json").data["changed"] == []


def test_state_filter_tells_dead_from_cancelled(relay: Relay) -> None:
    dead()
    cancelled = actions.enqueue()
    actions.cancel(cancelled)
    answer = relay("requeue", "--state", "cancelled", "--json")
    assert answer.data["changed"] == [cancelled]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Name job ids, or filters"),
        ((1, "--queue", "mail"), "not both"),
        (("--all-dead", "--state", "cancelled"), "not both"),
        (("--all-dead", "--limit", "0"), "must be at least 1"),
        (("--all-dead", "--limit", "9" * 25), "too large"),
        (("9" * 25,), "too large"),
    ],
)
def test_unclear_selection_is_refused(
    relay: Relay, arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        relay("requeue", *arguments)


def test_many_jobs_are_changed_in_bounded_transactions(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_ids = dead(count=5)
    sizes: list[int] = []

    def counting(tx: store.Transaction, job_ids: list[int]) -> store.Changed:
        sizes.append(len(job_ids))
        return store.requeue(tx, job_ids)

    monkeypatch.setattr(operations, "BATCH", 2)
    changed, stopped = operate.change(replace(operations.REQUEUE, verb=counting), job_ids)
    assert sizes == [2, 2, 1]
    assert (changed.job_ids, stopped) == (job_ids, "")


def test_full_queue_stops_and_says_how_far_it_came(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_ids = dead("small", 3)
    with store.transaction() as tx:
        store.set_limits(tx, "small", capacity=2, max_running=None)
    monkeypatch.setattr(operations, "BATCH", 2)
    answer = relay("requeue", "--all-dead", "--yes")
    assert answer.code == 1
    assert f"Requeued 2 jobs: {job_ids[0]}, {job_ids[1]}." in answer.text
    assert "queue 'small' is full" in answer.errors


def test_cancel_voids_the_lease_of_a_running_job(relay: Relay) -> None:
    job_id = actions.enqueue()
    held = actions.claim_one()
    assert relay("cancel", job_id).text == f"Cancelled 1 job: {job_id}.\n"
    assert actions.state(job_id) == "cancelled"
    assert not actions.ack(held).accepted


def test_cancel_of_a_finished_job_gives_exit_code_1(relay: Relay) -> None:
    (job_id,) = dead()
    answer = relay("cancel", job_id)
    assert answer.code == 1
    assert f"{job_id} is dead" in answer.text


def test_long_lists_are_cut_in_text_and_whole_in_json(relay: Relay) -> None:
    dead(count=operate.SHOWN_IDS + 3)
    assert "and 3 more" in relay("cancel", *range(1000, 1023)).text
    answer = relay("requeue", "--all-dead", "--yes", "--json")
    assert len(answer.data["changed"]) == operate.SHOWN_IDS + 3


@pytest.mark.parametrize(("answer", "state"), [("y", "ready"), ("", "dead"), ("no", "dead")])
def test_person_at_a_terminal_is_asked(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, answer: str, state: str
) -> None:
    job_ids = dead(count=2)
    monkeypatch.setattr(operate.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    with suppress(CommandError):
        relay("requeue", "--all-dead")
    assert {actions.state(job_id) for job_id in job_ids} == {state}
