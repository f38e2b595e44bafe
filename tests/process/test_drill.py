"""``relay drill`` as a process: every row is kept, can differ, and nothing of it is left behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from relay_queue.lab.drill import runner
from relay_queue.lab.drill.results import PROMISES
from relay_queue.lab.server import Server
from tests import postgresql
from tests.conftest import ROOT, processes_with, wait_until
from tests.process.terminal import COLUMNS, on_a_terminal, widest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COMMAND = [sys.executable, "manage.py", "relay", "drill"]
SECONDS = 200

# Python imports it at the start of every process of the drill; it acts once Django is set up.
SABOTAGE = """
import os, django
honest_setup = django.setup
def setup(*arguments, **options):
    honest_setup(*arguments, **options)
    if "RELAY_LAB_DIR" in os.environ:
        sabotage()
django.setup = setup
"""

PLANTED = r"""
def sabotage():
    import re, sys
    from importlib import import_module
    from relay_queue.lab import project
    grant, settle = (import_module(f"relay_queue.store.{name}") for name in ("grant", "settle"))
    if "F1" not in sys.argv:  # which waits for what does happen
        project.PATIENCE_SECONDS = 6.0
    # Whoever knows the token of a lease may end it, at any time: no fence at all.
    guard = r"AND \S+ IS NULL AND \S+expires_at > %s"
    settle.END_LEASES, found = re.subn(guard, "AND %s IS NOT NULL", settle.END_LEASES)
    assert found == 1
    # Every checksum fits.
    grant._mark_altered = lambda tx, rows: rows
"""

FALSIFIED = """
def sabotage():
    from relay_queue.lab import processes
    from relay_queue.lab.drill import damage
    from relay_queue.lab.project import ScratchProject
    processes.threads = lambda pid: 1000
    outcomes, verify = ScratchProject.outcomes, damage._verify
    ScratchProject.outcomes = lambda self, job_id: [*outcomes(self, job_id), "sabotaged"]
    damage._verify = lambda *arguments: [*verify(*arguments), "sabotaged"]
"""


class Drill:
    """A drill in a temporary directory of its own, started in a project with a database."""

    def __init__(self, directory: Path, database: Path | str) -> None:
        self.directory = directory
        self.temporary = directory / "with space"
        self.temporary.mkdir()
        self.log = directory / "drill.log"
        self.environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "RELAY_TEST_DB": str(database),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }

    def start(self, *arguments: str, sabotage: str = "") -> subprocess.Popen[bytes]:
        environment = dict(self.environment)
        if sabotage:
            (self.directory / "sitecustomize.py").write_text(SABOTAGE + sabotage)
            environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{self.directory}"
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*COMMAND, *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text()

    def rows(self) -> dict[str, Any]:
        """Return what the drill printed with ``--json``, by row."""
        return {row["row"]: row for row in json.loads(self.output())["rows"]}

    def pids(self) -> dict[int, str]:
        """Return the processes of the drill, whoever their parent is by now."""
        return processes_with(f"TMPDIR={self.temporary}")

    def wait_for_workers(self) -> None:
        wait_until(lambda: "runworker" in str(self.pids()), message=self.output)

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.pids(), message=lambda: str(self.pids()))
        assert list(self.temporary.iterdir()) == []


@pytest.fixture
def drill(tmp_path: Path, database_file: Path) -> Iterator[Drill]:
    before = hashlib.sha256(database_file.read_bytes()).digest()
    drill = Drill(tmp_path, database_file)
    yield drill
    for pid in drill.pids():
        os.kill(pid, signal.SIGKILL)
    assert hashlib.sha256(database_file.read_bytes()).digest() == before
    assert [p.name for p in tmp_path.glob("relay.sqlite3*")] == [database_file.name], "not opened"


@pytest.mark.thorough  # `test_failure_table` executes the rows
def test_every_row_is_kept_and_the_projects_database_not_opened(drill: Drill) -> None:
    assert drill.start("--json").wait(SECONDS) == 0, drill.output()
    rows = drill.rows()
    assert list(rows) == list(PROMISES)
    for name, row in rows.items():
        assert (row["failure"], row["promise"]) == (PROMISES[name].failure, PROMISES[name].promise)
        assert_kept(row)
    drill.assert_nothing_left()


def assert_kept(row: dict[str, Any]) -> None:
    assert row["verdict"] == "kept", row
    assert len(row["observed"]) >= 3
    assert all(seen["found"] for seen in row["observed"])


# -- on PostgreSQL


class OnServer(NamedTuple):
    """A drill of a project on PostgreSQL, and the role of its own that it does everything as."""

    drill: Drill
    role: str
    server: postgresql.Server
    project: str

    def databases(self) -> list[str]:
        """Return the databases of the drill's role; other tests have drills of their own."""
        with self.server.connect() as connection:
            found = connection.execute(
                "SELECT datname FROM pg_database JOIN pg_roles r ON datdba = r.oid "
                "WHERE rolname = %s",
                [self.role],
            )
            return [name for (name,) in found]

    def say(self, statement: str) -> None:
        with self.server.connect() as connection:
            connection.execute(statement.format(role=self.role).encode())

    def touched(self) -> list[tuple[Any, ...]]:
        """Return the tables of the project's database that were ever read or written."""
        with psycopg.connect(self.project, autocommit=True) as connection:
            return connection.execute(
                "SELECT relname FROM pg_stat_user_tables "
                "WHERE seq_scan + n_tup_ins + n_tup_upd + n_tup_del > 0"
            ).fetchall()


@pytest.fixture
def on_server(
    tmp_path: Path, postgresql_server: postgresql.Server, postgresql_url: str
) -> Iterator[OnServer]:
    role = f"drill_{uuid.uuid4().hex[:8]}"
    drill = Drill(tmp_path, postgresql_url.replace(postgresql.USER, role, 1))
    found = OnServer(drill, role, postgresql_server, postgresql_url)
    found.say("CREATE ROLE {role} LOGIN CREATEDB")
    before = found.touched()
    yield found
    for pid in drill.pids():
        os.kill(pid, signal.SIGKILL)
    left = found.databases()
    for name in left:
        postgresql_server.drop(name)
    found.say("DROP ROLE {role}")
    assert left == []
    assert found.touched() == before, "the project's database is left alone"


@pytest.mark.thorough
def test_every_row_that_applies_is_kept_on_postgresql(on_server: OnServer) -> None:
    drill = on_server.drill
    assert drill.start("--json").wait(SECONDS) == 0, drill.output()
    rows = drill.rows()
    assert list(rows) == list(PROMISES)
    assert rows["F13"]["reason"] == PROMISES["F13"].not_on_server
    assert rows.pop("F13")["verdict"] == "not applicable"
    for row in rows.values():
        assert_kept(row)
    drill.assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_drill_that_is_ended_leaves_no_process_and_no_database(
    on_server: OnServer, number: int, code: int
) -> None:
    process = on_server.drill.start("--row", "F4")
    on_server.drill.wait_for_workers()
    (database,) = on_server.databases()
    assert database.startswith("relay_drill_")
    assert f"On scratch databases {database.rpartition('_')[0]}_…" in on_server.drill.output()
    process.send_signal(number)
    assert process.wait(60) == code, on_server.drill.output()
    assert "Traceback" not in on_server.drill.output()
    wait_until(lambda: not on_server.drill.pids(), message=on_server.drill.output)
    assert on_server.databases() == []


def test_a_role_without_createdb_is_refused_before_anything_is_done(on_server: OnServer) -> None:
    on_server.say("ALTER ROLE {role} NOCREATEDB")
    assert on_server.drill.start().wait(SECONDS) == 1
    said = on_server.drill.output()
    assert f"its role '{on_server.role}' has no right to: it lacks CREATEDB" in said
    assert "--sqlite" in said
    on_server.drill.assert_nothing_left()


@pytest.mark.torture
def test_every_row_that_applies_can_differ_on_postgresql(on_server: OnServer) -> None:
    drill = on_server.drill
    assert drill.start("--json", sabotage=FALSIFIED).wait(SECONDS) == 1, drill.output()
    verdicts = {name: row["verdict"] for name, row in drill.rows().items()}
    assert verdicts == dict.fromkeys(PROMISES, "differs") | {"F13": "not applicable"}
    drill.assert_nothing_left()


def test_a_row_that_gets_no_database_says_what_the_server_said(
    on_server: OnServer, tmp_path: Path, django_db_blocker: Any
) -> None:
    on_server.say("ALTER ROLE {role} NOCREATEDB")
    server = Server(
        {**on_server.server.settings("postgres"), "USER": on_server.role, "OPTIONS": {}}
    )
    with django_db_blocker.unblock():
        (result,) = runner.play(["F1"], runner.Site(tmp_path, server, "relay_drill_x"))
    assert result.verdict == "differs"
    assert result.fault == "no scratch database: permission denied to create database"


# -- what differs


def test_rows_differ_when_relay_does_not_keep_its_promises(drill: Drill) -> None:
    """An ack needs no open lease, and no checksum is looked at: F4 and F12 see it, F1 need not."""
    rows = ["--row", "F1", "--row", "f4", "--row", "F12"]
    assert drill.start("--json", *rows, sabotage=PLANTED).wait(SECONDS) == 1, drill.output()
    verdicts = {name: row["verdict"] for name, row in drill.rows().items()}
    assert verdicts == {"F1": "kept", "F4": "differs", "F12": "differs"}
    drill.assert_nothing_left()


def test_a_row_that_sees_something_else_shows_what_was_promised(drill: Drill) -> None:
    rows = ["--row", "F10", "--row", "F2"]
    assert drill.start(*rows, sabotage=FALSIFIED).wait(SECONDS) == 1, drill.output()
    said = drill.output()
    assert "attempts: cancelled, sabotaged (promised: cancelled)" in said
    assert "0 of 2 kept, 2 differ" in said
    assert "the end of its workers' logs" in said
    drill.assert_nothing_left()


@pytest.mark.torture
def test_every_row_can_differ(drill: Drill) -> None:
    assert drill.start("--json", sabotage=FALSIFIED).wait(SECONDS) == 1, drill.output()
    assert {name: row["verdict"] for name, row in drill.rows().items()} == dict.fromkeys(
        PROMISES, "differs"
    )
    drill.assert_nothing_left()


def test_a_row_whose_process_fails_differs(drill: Drill) -> None:
    broken = "def sabotage():\n    import relay_queue.lab.drill.rows as r\n    r.ROWS.clear()\n"
    assert drill.start("--json", "--row", "F1", sabotage=broken).wait(SECONDS) == 1
    answer = drill.output()
    report = json.loads(answer[answer.index('{\n  "rows"') :])
    assert report["rows"][0]["fault"] == "the process that executes the row ended with exit code 1"
    drill.assert_nothing_left()


def test_an_interrupted_drill_leaves_nothing(drill: Drill) -> None:
    process = drill.start("--row", "F4", "--row", "F9")
    drill.wait_for_workers()
    # As a terminal does; and somebody is impatient.
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, drill.output()
    assert "Traceback" not in drill.output()
    drill.assert_nothing_left()


def test_on_a_terminal_the_table_keeps_to_its_width(drill: Drill) -> None:
    code, text = on_a_terminal([*COMMAND, "--row", "F1"], drill.environment, SECONDS)
    assert code == 0, text
    assert "attempts: lost, acked" in text
    assert widest(text) <= COLUMNS
    drill.assert_nothing_left()
