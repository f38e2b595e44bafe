"""What ``make serve`` fills a new database with: real jobs, brought to their states by a worker."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import ROOT, processes_with, wait_until

pytestmark = pytest.mark.slow

FILL = "import django; django.setup(); from relay_project import demo_data; print(demo_data.fill())"


class Site:
    """The reference project with a directory of its own for what it writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.worker: subprocess.Popen[bytes] | None = None
        self.environment = {
            **os.environ,
            "RELAY_VAR": str(directory),
            "DJANGO_SETTINGS_MODULE": "relay_project.settings",
        }

    def python(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return done.stdout.strip()

    def start_worker(self) -> subprocess.Popen[bytes]:
        with (self.directory / "worker.log").open("wb") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "manage.py", "runworker", "--shutdown-timeout", "0"],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.worker

    def counts(self, sql: str) -> dict[str, int]:
        with closing(sqlite3.connect(self.directory / "relay.sqlite3", timeout=30)) as connection:
            return dict(connection.execute(sql).fetchall())

    def states(self) -> dict[str, int]:
        return self.counts("SELECT state, count(*) FROM relay_queue_job GROUP BY state")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.python("manage.py", "migrate", "--verbosity", "0")
    yield site
    for pid in processes_with(f"RELAY_VAR={tmp_path}"):
        os.kill(pid, signal.SIGKILL)
    if site.worker is not None:
        site.worker.wait()


def test_database_with_jobs_is_left_alone(site: Site) -> None:
    assert int(site.python("-c", FILL)) > 0
    before = site.states()
    assert site.python("-c", FILL) == "0"
    assert site.states() == before


def test_worker_brings_the_jobs_into_all_their_states(site: Site) -> None:
    total = int(site.python("-c", FILL))
    worker = site.start_worker()

    expected = {"scheduled": 3, "running": 1, "retrying": 2, "dead": 5, "cancelled": 1}
    expected["succeeded"] = total - sum(expected.values())
    wait_until(lambda: site.states() == expected, message=lambda: f"{site.states()}")
    late = "SELECT job_id, 1 FROM relay_queue_lease WHERE refused_at IS NOT NULL"
    wait_until(lambda: len(site.counts(late)) == 1, message="a late result was refused")
    traceless = (
        "SELECT job_id, 1 FROM relay_queue_lease WHERE outcome = 'failed' AND traceback = ''"
    )
    assert site.counts(traceless) == {}
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    assert "No fault" in site.python("manage.py", "relay", "verify")


def test_jobs_keep_coming_until_the_visitors_are_cancelled(site: Site) -> None:
    open_doors = FILL.replace("print(demo_data.fill())", "demo_data.open_doors()")
    site.python("-c", open_doors)
    site.start_worker()
    wait_until(lambda: sum(site.states().values()) > 3, message="visitors come")
    site.python("manage.py", "relay", "cancel", "1")
    wait_until(lambda: site.states().get("cancelled") == 1)
    open_leases = "SELECT 'open', count(*) FROM relay_queue_lease WHERE ended_at IS NULL"
    wait_until(lambda: site.counts(open_leases)["open"] == 0)
