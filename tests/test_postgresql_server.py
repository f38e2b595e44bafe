"""The tests' own PostgreSQL: it works as root, it is private, and nothing of it is left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgresql
from tests.conftest import ROOT, Project, processes_with, wait_until

pytestmark = pytest.mark.slow

RUN = """
import sys, time
from tests import postgresql
run = postgresql.Run()
print(run.folder, flush=True)
postgresql.shared()
print("up", flush=True)
sys.stdin.read()
run.close()
"""


@pytest.fixture
def run_process(postgresql_server: postgresql.Server) -> Iterator[subprocess.Popen[str]]:
    """Return a process that holds a run of its own, and has started its server."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_run_that_is_killed_leaves_no_server_and_no_files(
    run_process: subprocess.Popen[str],
) -> None:
    assert run_process.stdout is not None
    folder = Path(run_process.stdout.readline().strip())
    assert run_process.stdout.readline() == "up\n"
    assert processes_with(f"{postgresql.RUN_VARIABLE}={folder}")
    run_process.kill()
    wait_until(lambda: not folder.exists())
    wait_until(lambda: not processes_with(f"{postgresql.RUN_VARIABLE}={folder}"))


def test_run_that_ends_waits_until_its_server_has_gone(run_process: subprocess.Popen[str]) -> None:
    assert run_process.stdout is not None
    folder = Path(run_process.stdout.readline().strip())
    assert run_process.stdout.readline() == "up\n"
    run_process.communicate(timeout=120)
    assert run_process.returncode == 0
    assert not folder.exists()


def test_server_listens_to_no_network(postgresql_server: postgresql.Server) -> None:
    with postgresql_server.connect() as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)


def test_processes_of_a_project_share_a_migrated_database(postgresql_project: Project) -> None:
    assert postgresql_project.rows("SELECT count(*) FROM relay_queue_job") == [(0,)]
    postgresql_project.python(
        "from django.contrib.auth.models import Group; Group.objects.create(name='mine')"
    )
    assert postgresql_project.rows("SELECT name FROM auth_group") == [("mine",)]
