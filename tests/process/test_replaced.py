"""The database file is replaced or removed while workers run: they end, and go on with the new one."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import Project, wait_until

ENQUEUE = (
    "import sys\nfrom tests import tasks\nfor n in range(int(sys.argv[1])): tasks.echo.enqueue(n)"
)


def states(database: Path) -> dict[str, int]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        query = "SELECT state, count(*) FROM relay_queue_job GROUP BY state"
        return dict(connection.execute(query).fetchall())


@pytest.mark.parametrize("how", ["backup", "removed and made"])
def test_workers_end_and_go_on_with_the_file_that_is_there(project: Project, how: str) -> None:
    database = Path(project.database)
    backup = database.with_name("backup.sqlite3")
    project.manage("relay", "backup", str(backup))
    project.python(ENQUEUE, "30")
    worker = project.spawn("runworker", "--concurrency", "2")
    wait_until(lambda: states(database) == {"succeeded": 30}, message=lambda: project.log(worker))
    old = os.stat(f"{database}-wal").st_ino
    assert os.stat(f"{database}-wal").st_size > 0
    if how == "backup":
        backup.rename(database)
    else:
        # Kept under another name, so that its inode is not given to the new one.
        database.rename(database.with_name("gone.sqlite3"))
        shutil.copyfile(backup, database)
    project.python(ENQUEUE, "20")
    wait_until(lambda: "ended with exit code 73" in project.log(worker), message=how)
    wait_until(lambda: states(database) == {"succeeded": 20}, message=lambda: project.log(worker))
    assert "after this process had opened it" in project.log(worker)
    assert project.manage("relay", "verify").returncode == 0
    kept = list(database.parent.glob("*-wal-replaced-*"))
    assert [os.stat(path).st_ino for path in kept] == [old]
    doctor = project.manage("relay", "doctor", check=False).stdout
    assert "was replaced while it was in use" in doctor
    assert kept[0].name in doctor
    assert project.stop(worker) == 0
