"""Inspect shows the files and the tables, and tells the story of one job."""

from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError

from tests.conftest import Project
from tests.store import actions

pytestmark = pytest.mark.django_db
Relay = Callable[..., Any]


def test_file_log_jobs_and_ledger_are_shown(relay: Relay) -> None:
    actions.enqueue()
    actions.ack(actions.claim_one())
    data = relay("inspect", "--json").data
    assert data["file"]["journal_mode"] == "wal"
    assert data["file"]["page_size"] >= 512
    assert data["jobs"] == {"default": {"succeeded": 1}}
    assert data["ledger"] == {"acked": 1}
    assert data["refused"] == 0
    text = relay("inspect").text
    assert "Write-ahead log" in text
    assert "succeeded" in text


def test_log_of_a_killed_process_is_shown_as_it_was_left(project: Project) -> None:
    project.python(
        "import os\nfrom tests.store import actions\n"
        "for n in range(3): actions.enqueue()\nos._exit(0)"
    )
    text = project.manage("relay", "inspect").stdout
    facts = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    assert facts["header"] == "sound"
    assert int(facts["commits"]) == 3
    assert facts["tail"] == "clean"


def test_cut_log_is_shown_as_torn(project: Project) -> None:
    project.python("import os\nfrom tests.store import actions\nactions.enqueue()\nos._exit(0)")
    log = project.database.with_name(project.database.name + "-wal")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 10)
    text = project.manage("relay", "inspect").stdout
    assert "torn: " in text


def test_story_lists_attempts_and_never_shows_a_whole_token(relay: Relay) -> None:
    job_id = actions.enqueue()
    late = actions.claim_one(worker_id=actions.register(name="alpha"))
    actions.kill(late)
    actions.ack(late)
    actions.ack(actions.claim_one())
    text = relay("inspect", "--job", job_id).text
    assert "Attempt 1, lease" in text
    assert ": lost" in text
    assert "a late ack: the lease had ended: lost" in text
    assert "verdict     ran more than once" in text
    assert "alpha (host, pid 1)" in text
    assert late.token[:8] in text
    assert late.token not in text
    as_json = relay("inspect", "--job", job_id, "--json")
    assert late.token not in as_json.text
    assert [lease["outcome"] for lease in as_json.data["leases"]] == ["lost", "acked"]
    assert as_json.data["verdict"] == "ran more than once"


def test_unknown_job_is_an_error_that_says_why(relay: Relay) -> None:
    with pytest.raises(CommandError, match="there is no job 404; it may have been pruned"):
        relay("inspect", "--job", 404)
