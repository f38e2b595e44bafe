"""Doctor names what is wrong and the way out, and fails only on what fails."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from relay_queue import clock
from relay_queue.cli import doctor
from relay_queue.models import Worker
from relay_queue.query.status import WorkerStatus
from relay_queue.worker.liveness import Liveness
from tests.conftest import Project
from tests.store import actions

pytestmark = pytest.mark.django_db
Relay = Callable[..., Any]


def findings(answer: Any) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in answer.data["findings"]}


def test_healthy_project_exits_with_0(relay: Relay) -> None:
    answer = relay("doctor", "--json")
    assert answer.code == 0
    found = findings(answer)
    for name in ("python", "django", "sqlite", "engine", "migrations", "pragma journal_mode"):
        assert found[name]["level"] == "ok", found[name]
    assert found["workers"]["hint"] == "Jobs wait until one is started: manage.py runworker."


def test_each_line_begins_with_its_level(relay: Relay) -> None:
    lines = relay("doctor").text.splitlines()
    assert all(line.split()[0] in ("ok", "warn", "fail", "→") for line in lines)


def test_settings_that_make_no_sense_fail_with_the_way_out(relay: Relay, settings: Any) -> None:
    settings.RELAY = {"LEASE_SECONDZ": 5}
    answer = relay("doctor", "--json")
    assert answer.code == 1
    assert "LEASE_SECONDS" in findings(answer)["check relay_queue.E001"]["hint"]


def test_missing_migrations_fail(project: Project) -> None:
    project.manage("migrate", "relay_queue", "zero", "--verbosity", "0")
    answer = project.manage("relay", "doctor", check=False)
    assert answer.returncode == 1
    assert "not applied: relay_queue.0001_initial" in answer.stdout
    assert "Run manage.py migrate" in answer.stdout


def test_weak_durability_is_a_warning(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    connection.ensure_connection()
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 10")
    try:
        found = findings(relay("doctor", "--json"))["pragma busy_timeout"]
    finally:
        connection.connection.execute("PRAGMA busy_timeout = 20000")
    assert found["level"] == "warn"
    assert "timeout in OPTIONS" in found["hint"]


def test_heartbeat_in_the_future_is_a_warning(relay: Relay) -> None:
    ahead = clock.now() + timedelta(minutes=10)
    with clock.use(lambda: ahead):
        actions.register()
    found = findings(relay("doctor", "--json"))["clock"]
    assert found["level"] == "warn"
    assert "9 min 59 s in the future" in found["text"] or "10 min in the future" in found["text"]


@pytest.mark.parametrize(
    ("verdict", "age", "level"),
    [
        (Liveness.ALIVE, 3.0, "ok"),
        (Liveness.ALIVE, 600.0, "warn"),
        (Liveness.DEAD, 3.0, "warn"),
        (Liveness.UNKNOWN, 3.0, "ok"),
        (Liveness.UNKNOWN, 600.0, "warn"),
        (Liveness.ALIVE, 59.0, "ok"),
        (Liveness.ALIVE, 61.0, "warn"),
        (Liveness.UNKNOWN, 61.0, "warn"),
    ],
)
def test_worker_is_judged_by_its_lock_and_its_heartbeat(
    verdict: Liveness, age: float, level: str
) -> None:
    worker = WorkerStatus(Worker(name="w"), open_leases=0, heartbeat_age_seconds=age)
    found = doctor.judge_worker(worker, verdict)
    assert found.level == level
    assert bool(found.hint) == (level == "warn")


@pytest.mark.parametrize(
    ("free", "level"), [(10 * 1024**3, "ok"), (500 * 1024**2, "warn"), (1024**2, "fail")]
)
def test_little_disk_space_is_a_warning_and_none_a_failure(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    class Usage:
        def __init__(self, free: int) -> None:
            self.free = free

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(free))
    answer = relay("doctor", "--json")
    assert findings(answer)["disk"]["level"] == level
    assert answer.code == (1 if level == "fail" else 0)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_queue_that_no_worker_serves_is_a_warning(relay: Relay, deferred: bool) -> None:
    later = clock.now() + timedelta(hours=1)
    actions.register(queues=["default"])
    actions.enqueue(queue="default")
    actions.enqueue(queue="mail", run_after=later if deferred else None)
    found = findings(relay("doctor", "--json"))
    assert found["queue mail"]["level"] == "warn"
    assert "manage.py runworker" in found["queue mail"]["hint"]
    assert "queue default" not in found


def test_examination_that_cannot_be_done_is_a_finding() -> None:
    def _broken() -> Any:
        raise OSError("no such device")
        yield

    (found,) = doctor._attempt(_broken)
    assert (found.name, found.level, found.text) == ("broken", "fail", "no such device")


def test_logs_of_a_replaced_file_are_a_warning(project: Project) -> None:
    aside = Path(f"{project.database}-wal-replaced-20261201T000000")
    aside.touch()
    answer = project.manage("relay", "doctor", check=False)
    (line,) = (line for line in answer.stdout.splitlines() if line.split()[:2] == ["warn", "file"])
    assert aside.name in line
    aside.unlink()
    assert "was replaced" not in project.manage("relay", "doctor", check=False).stdout


def test_a_page_that_cannot_be_read_is_a_failure(project: Project) -> None:
    ((root, size),) = project.rows(
        "SELECT rootpage, page_size FROM sqlite_schema, pragma_page_size"
        " WHERE name = 'relay_queue_job'"
    )
    project.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(project.database, "r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * size)
    answer = project.manage("relay", "doctor", check=False)
    assert answer.returncode == 1
    assert [line for line in answer.stdout.splitlines() if line.split()[:2] == ["fail", "file"]]
