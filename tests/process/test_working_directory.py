"""A function changes the working directory of its worker; the database's name was relative."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import DATABASE_VARIABLE, Project, wait_until
from tests.db.conftest import DJANGOS_ENGINE, ENGINE

WORK = """
import sys
from django.conf import settings
from django.core.management import call_command
settings.DATABASES["default"]["ENGINE"] = sys.argv[1]
call_command("runworker", "--concurrency", "1")
"""

# The one slot has no connection before the first of these, and a new one for the second.
ENQUEUE = """
import sys
from tests import tasks
tasks.change_directory.enqueue(sys.argv[1])
tasks.create_group.enqueue("first")
tasks.create_group.enqueue("second")
"""


@pytest.mark.parametrize("engine", [ENGINE, DJANGOS_ENGINE])
def test_later_jobs_have_the_same_database(project: Project, tmp_path: Path, engine: str) -> None:
    database = Path(project.database)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    project.python(ENQUEUE, str(elsewhere))
    worker = project.spawn_python(
        WORK, engine, cwd=database.parent, env={DATABASE_VARIABLE: database.name}
    )
    done = "SELECT count(*), sum(state = 'succeeded') FROM relay_queue_job"
    wait_until(lambda: project.rows(done) == [(3, 3)], message=lambda: project.log(worker))
    # Its name went with its environment: a stop by force would not find its children.
    assert project.stop(worker) == 0
    assert project.rows("SELECT name FROM auth_group ORDER BY name") == [("first",), ("second",)]
    assert os.listdir(elsewhere) == []
