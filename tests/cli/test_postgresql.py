"""The verbs that look at the database say on PostgreSQL what they say on SQLite, or what instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.core.management.base import CommandError

from relay_queue.cli import doctor
from relay_queue.query import server
from tests import postgresql
from tests.conftest import Project
from tests.store import actions

pytestmark = pytest.mark.slow

Told = Callable[..., Any]


@pytest.fixture
def told(
    relay: Callable[..., Any], postgresql_url: str, django_db_setup: None, django_db_blocker: Any
) -> Iterator[Told]:
    """Return what runs a verb on a server with three jobs, and reads what it says as JSON."""

    def run(*arguments: str, code: int = 0) -> Any:
        answer = relay(*arguments, "--json")
        assert answer.code == code, answer
        return answer.data

    with django_db_blocker.unblock(), postgresql.default_is(postgresql_url):
        actions.enqueue_each(3)
        actions.ack(actions.claim(2)[0])
        yield run


def test_verbs_that_look_speak_of_a_server(told: Told, relay: Callable[..., Any]) -> None:
    findings = {each["name"]: each for each in told("doctor")["findings"]}
    assert findings["server"]["text"].startswith("PostgreSQL ")
    assert findings["driver"]["text"] == f"psycopg {psycopg.__version__}"
    assert findings["setting synchronous_commit"]["level"] == "ok"
    # The server of the tests throws everything away.
    assert findings["setting fsync"]["level"] == "warn"
    assert not [name for name in findings if name.startswith("pragma")]

    seen = told("inspect")
    assert (seen["file"], seen["log"]) == (None, None)
    assert seen["jobs"] == {"default": {"ready": 1, "running": 1, "succeeded": 1}}
    assert seen["tables"]["relay_queue_job"]["size_bytes"] > 0
    assert "Database server" in relay("inspect").text

    status = told("status")
    counts = {state: n for state, n in status["queues"][0]["counts"].items() if n}
    assert counts == {"ready": 1, "running": 1, "succeeded": 1}

    sound = told("verify")
    assert (sound["ok"], sound["jobs"]) == (True, 3)
    assert "pg_amcheck" in sound["notes"][0]

    told("recover", "--recount")
    would = told("prune", "--older-than", "0s", "--dry-run")["would_delete"]
    assert would["succeeded"] == 1
    assert told("prune", "--older-than", "0s")["deleted"] == would


def test_verify_names_what_was_changed_behind_its_back(told: Told, postgresql_url: str) -> None:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")  # keys are not checked
        connection.execute("UPDATE relay_queue_job SET payload = '[]' WHERE state = 'ready'")
        connection.execute("UPDATE relay_queue_queuecount SET n = n + 5 WHERE state = 'ready'")
        connection.execute("DELETE FROM relay_queue_job WHERE state = 'succeeded'")
    found = told("verify", code=1)
    assert {"checksum", "counter", "foreign_key"} <= {fault["kind"] for fault in found["faults"]}


def test_backup_names_the_tool_of_a_server(postgresql_project: Project, tmp_path: Any) -> None:
    done = postgresql_project.manage("relay", "backup", str(tmp_path / "copy"), check=False)
    assert done.returncode == 1
    assert "pg_dump" in done.stderr


@pytest.fixture
def nowhere(django_db_blocker: Any) -> Iterator[None]:
    """Let the queue be on a server that is not there."""
    with (
        django_db_blocker.unblock(),
        postgresql.default_is("postgresql://relay@/x?host=/nowhere&port=1"),
    ):
        yield


@pytest.mark.parametrize("verb", ["verify", "inspect", "status", "drill", "prune"])
def test_server_that_is_not_reached_is_the_only_thing_said(
    relay: Callable[..., Any], nowhere: None, verb: str
) -> None:
    with pytest.raises(CommandError, match=r"^the database cannot be used: .*nowhere") as refused:
        relay(verb)
    assert "\n" not in str(refused.value)


def test_doctor_says_once_that_a_server_is_not_reached(
    relay: Callable[..., Any], nowhere: None
) -> None:
    answer = relay("doctor", "--json")
    failed = [each for each in answer.data["findings"] if each["level"] == "fail"]
    assert (answer.code, [each["name"] for each in failed]) == (1, ["server"])
    assert failed[0]["hint"].startswith("Start the server")


def judged(name: str, **changes: Any) -> str:
    from datetime import UTC, datetime, timedelta

    now = datetime(2026, 1, 1, tzinfo=UTC)
    sound = {key: min(values) for key, (values, _hint) in doctor.SERVER_SETTINGS.items()}
    values = {
        "version": "PostgreSQL 15",
        "now": now,
        "clock_ahead_seconds": 0.0,
        "standby": False,
        "settings": sound | changes.pop("settings", {}),
        "oldest_transaction_at": now - timedelta(minutes=changes.pop("minutes", 1)),
        "connections": 5,
        "max_connections": 100,
        "size_bytes": 1,
    }
    found = server.Server(**{**values, **changes})
    settings = doctor.judge_values("setting", found.settings, doctor.SERVER_SETTINGS)
    findings = [*settings, *doctor.judge_load(found)]
    return {found.name.removeprefix("setting "): found.hint for found in findings}.get(name, "")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("synchronous_commit", {"settings": {"synchronous_commit": "off"}}),
        ("autovacuum", {"settings": {"autovacuum": "off"}}),
        ("default_transaction_isolation", {"settings": {"default_transaction_isolation": "x"}}),
        ("role", {"standby": True}),
        ("oldest transaction", {"minutes": 11}),
        ("connections", {"connections": 95}),
        ("server clock", {"clock_ahead_seconds": -60.0}),
    ],
)
def test_what_is_wrong_with_a_server_has_a_way_out(name: str, changes: dict[str, Any]) -> None:
    assert judged(name) == ""
    assert judged(name, **changes)


def test_a_commit_that_waits_for_a_standby_is_sound() -> None:
    assert judged("synchronous_commit", settings={"synchronous_commit": "remote_apply"}) == ""
