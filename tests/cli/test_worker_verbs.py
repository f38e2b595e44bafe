"""Quiet and stop-worker write an order on the rows of workers."""

from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError

from relay_queue import store
from relay_queue.models import Worker
from tests.store import actions

pytestmark = pytest.mark.django_db
Relay = Callable[..., Any]


def order(worker_id: int) -> str:
    return Worker.objects.get(pk=worker_id).ordered


def test_quiet_by_name_and_its_undo(relay: Relay) -> None:
    one, other = actions.register(name="a"), actions.register(name="b")
    answer = relay("quiet", "a")
    assert (answer.code, order(one), order(other)) == (0, "quiet", "")
    assert f"Told to claim nothing more: a (id {one})." in answer.text
    assert relay("quiet", "a", "--undo", "--json").data == {"told": [one], "passed_over": []}
    assert order(one) == ""


def test_stop_by_id_is_final(relay: Relay) -> None:
    one = actions.register(name="a")
    assert relay("stop-worker", one).code == 0
    answer = relay("quiet", "a", "--undo")
    assert (answer.code, order(one)) == (1, "stop")
    assert f"Ended, or told to stop, already: a (id {one})." in answer.text


def test_all_are_those_that_have_not_ended(relay: Relay) -> None:
    live, ended = actions.register(), actions.register()
    actions.do(store.stop_workers, [ended], "stopped")
    assert relay("stop-worker", "--all", "--json").data["told"] == [live]
    assert order(ended) == ""


def test_worker_that_has_ended_gives_exit_code_1(relay: Relay) -> None:
    ended = actions.register()
    actions.do(store.stop_workers, [ended], "stopped")
    assert relay("stop-worker", ended).code == 1


def test_name_of_several_workers_is_refused_with_their_ids(relay: Relay) -> None:
    one, two = actions.register(name="twin"), actions.register(name="twin")
    with pytest.raises(CommandError, match=rf"name one by its id: {one}, {two}"):
        relay("quiet", "twin")


def test_status_shows_the_order(relay: Relay) -> None:
    actions.register(name="a"), actions.register(name="b")
    relay("quiet", "a")
    relay("stop-worker", "b")
    text = relay("status").text
    assert "quiet" in text
    assert "stopping" in text
    assert {w["ordered"] for w in relay("status", "--json").data["workers"]} == {"quiet", "stop"}


@pytest.mark.parametrize("arguments", [(), ("a", "--all"), ("nobody",), ("9" * 30,)])
def test_unclear_workers_are_refused(relay: Relay, arguments: tuple[str, ...]) -> None:
    actions.register(name="a")
    with pytest.raises(CommandError, match=r"Name workers, or say --all|there is no worker"):
        relay("quiet", *arguments)
