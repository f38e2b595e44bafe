"""``relay schedules``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError

from relay_queue import schedules
from relay_queue.models import Job
from relay_queue.schedules import cron, every, schedule
from tests import tasks

pytestmark = pytest.mark.django_db
Relay = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with no declaration, and leave none behind."""
    monkeypatch.setattr(schedules, "_declared", {})


def test_the_command_lists_what_there_is(relay: Relay) -> None:
    assert "There is no schedule" in relay("schedules").text
    schedule("nightly", cron("0 3 * * *", "Europe/Berlin"))(tasks.noop)
    assert relay("schedules", "sync").text == "Added: nightly.\n"
    assert relay("schedules", "sync").text == "The schedules are what the code declares.\n"
    text = relay("schedules").text
    assert "0 3 * * * Europe/Berlin" in text
    assert "tests.tasks.noop" in text
    (each,) = relay("schedules", "list", "--json").data["schedules"]
    assert (each["name"], each["stands_still"], each["last_outcome"]) == ("nightly", "", "")
    relay("schedules", "pause", "nightly")
    assert "paused" in relay("schedules").text


def test_the_command_changes_one_schedule(relay: Relay) -> None:
    schedule("s", every(900))(tasks.noop)
    relay("schedules", "sync")
    assert relay("schedules", "pause", "s").text == "s stands still.\n"
    assert relay("schedules", "pause", "s").text == "s is paused already.\n"
    assert relay("schedules", "next", "s").text == "s stands still: paused.\n"
    assert relay("schedules", "resume", "s", "--json").data == {"schedule": "s", "changed": True}
    job_id = relay("schedules", "run", "s", "--json").data["job_id"]
    assert Job.objects.get().pk == job_id
    assert f"job {job_id}" not in relay("schedules").text, "a run by hand is no slot"
    assert len(relay("schedules", "next", "s", "--count", "3", "--json").data["slots"]) == 3


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["pause"], "needs the name"),
        (["list", "s"], "takes no name"),
        (["pause", "other"], "there is no schedule 'other'; relay schedules lists them"),
        (["next", "s", "--count", "0"], "--count is 0"),
    ],
)
def test_the_command_says_what_it_needs(relay: Relay, arguments: list[str], why: str) -> None:
    schedule("s", every(900))(tasks.noop)
    schedules.sync()
    with pytest.raises(CommandError, match=why):
        relay("schedules", *arguments)


def test_a_run_by_hand_is_not_shown_as_what_became_of_the_last_slot(relay: Relay) -> None:
    schedule("s", every(900))(tasks.noop)
    relay("schedules", "sync")
    relay("schedules", "run", "s")
    (each,) = relay("schedules", "--json").data["schedules"]
    assert (each["last_outcome"], each["last_slot_at"], each["last_job_id"]) == ("", None, None)
