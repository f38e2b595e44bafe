"""Verify looks at SQLite's files before and beside the rows: log, pages, text that is none any more."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from relay_queue.query.verify import Verification, verify
from tests.conftest import Project
from tests.query.test_verify import faults, run
from tests.store.actions import connection, enqueue_each

ENQUEUE = """
from relay_queue import store
with store.transaction() as tx:
    store.enqueue_many(tx, [
        store.new_job(task="tests.tasks.anything", args=["x" * 300], kwargs={})
        for _ in range(400)
    ])
"""

# Leaves the log behind, as a killed process does.
AND_VANISH = "import os; os._exit(0)\n"

VERIFY = """
import json, sys
from relay_queue.query.verify import verify
answer = verify(sys.argv[1])
print(json.dumps({"kinds": [f.kind for f in answer.faults], "notes": answer.notes,
                  "messages": [f.message for f in answer.faults], "jobs": answer.jobs}))
"""


def verify_file(project: Project) -> dict[str, list[str]]:
    return json.loads(project.python(VERIFY, str(project.database)).stdout)


def wal_of(project: Project) -> Path:
    return project.database.with_name(project.database.name + "-wal")


@pytest.fixture(scope="module")
def left_by_the_dead(
    migrated_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """Return the database and the log that a killed process left, by their suffixes."""
    directory = tmp_path_factory.mktemp("left")
    file = Path(shutil.copyfile(migrated_template, directory / "relay.sqlite3"))
    project = Project(file, directory / "logs")
    project.python(ENQUEUE + ENQUEUE + AND_VANISH)
    return {"": file.read_bytes(), "-wal": wal_of(project).read_bytes()}


@pytest.fixture
def abandoned(project: Project, left_by_the_dead: dict[str, bytes]) -> Project:
    """Return the project on a database and a log that a killed process left."""
    for suffix, content in left_by_the_dead.items():
        Path(f"{project.database}{suffix}").write_bytes(content)
    return project


def test_sound_file_with_a_log_left_by_a_killed_process_is_sound(abandoned: Project) -> None:
    assert wal_of(abandoned).stat().st_size > 0
    answer = verify_file(abandoned)
    assert (answer["kinds"], answer["notes"], answer["jobs"]) == ([], [], 800)


def test_torn_log_is_named_before_sqlite_repairs_it(abandoned: Project) -> None:
    with wal_of(abandoned).open("r+b") as file:
        file.truncate(wal_of(abandoned).stat().st_size - 100)
    answer = verify_file(abandoned)
    assert answer["kinds"] == ["log_torn"]
    assert verify_file(abandoned)["kinds"] == [], "the advice says that it is gone at the next look"


def test_log_that_was_removed_after_a_crash_is_named(project: Project) -> None:
    project.python(ENQUEUE + AND_VANISH)
    wal_of(project).unlink()
    answer = verify_file(project)
    assert "log_missing" in answer["kinds"]
    assert any("committed frames" in message for message in answer["messages"])


def test_flipped_bit_in_the_log_is_named(abandoned: Project) -> None:
    with wal_of(abandoned).open("r+b") as file:
        file.seek(32 + 24 + 1000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    answer = verify_file(abandoned)
    assert "log_corrupt" in answer["kinds"]
    assert any("frame 1" in message for message in answer["messages"])


def test_damaged_page_is_named(abandoned: Project) -> None:
    root = abandoned.rows("SELECT rootpage FROM sqlite_master WHERE name = 'relay_queue_job'")[0][0]
    size = abandoned.rows("PRAGMA page_size")[0][0]
    # The last to close has taken in the log.
    assert not wal_of(abandoned).exists()
    with abandoned.database.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * 64)
    answer = verify_file(abandoned)
    assert "database_corrupt" in answer["kinds"]


def test_open_connection_is_noted_since_it_may_have_repaired_the_log(
    transactional_db: None,
) -> None:
    run("SELECT 1")
    answer: Verification = verify(str(connection().settings_dict["NAME"]))
    assert any("had the database open" in note for note in answer.notes)
    assert answer.ok


def test_log_can_be_checkpointed_between_two_ranges(transactional_db: None) -> None:
    enqueue_each(20)
    checkpoints: list[tuple[int, int, int]] = []

    def checkpoint(what: str, done: int, total: int) -> None:
        if what == "jobs":
            with closing(sqlite3.connect(connection().settings_dict["NAME"])) as other:
                checkpoints.append(other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())

    assert verify(jobs_per_range=5, progress=checkpoint).ok
    assert [busy for busy, _, _ in checkpoints] == [0, 0, 0, 0]


def test_payload_that_is_no_text_any_more_is_named_and_its_neighbours_are_still_checked(
    transactional_db: None,
) -> None:
    _, broken, third = enqueue_each(3)
    run("UPDATE relay_queue_job SET payload = CAST(x'7bff' AS TEXT) WHERE id = %s", broken)
    run("UPDATE relay_queue_job SET task = 'other' WHERE id = %s", third)
    assert [(f.kind, f.job_id) for f in faults()] == [("unreadable", broken), ("checksum", third)]
