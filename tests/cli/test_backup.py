"""Backup makes a checked copy of one moment, whole or not at all."""

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError

from relay_queue.cli import upkeep
from relay_queue.db.filename import database_path
from tests.conftest import Project, wait_until
from tests.store import actions

Relay = Callable[..., Any]


def jobs_in(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as copy:
        return copy.execute("SELECT count(*) FROM relay_queue_job").fetchone()[0]


@pytest.mark.django_db(transaction=True)
def test_copy_holds_the_jobs_in_one_file(relay: Relay, tmp_path: Path) -> None:
    actions.enqueue_each(3)
    answer = relay("backup", tmp_path / "copy.sqlite3")
    assert "3 jobs, integrity checked" in answer.text
    assert os.listdir(tmp_path) == ["copy.sqlite3"]
    assert jobs_in(tmp_path / "copy.sqlite3") == 3


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_copy_is_its_makers_alone_whatever_the_mode_of_the_database(
    relay: Relay, tmp_path: Path, umask: int
) -> None:
    source = Path(database_path("default"))
    mode = source.stat().st_mode
    source.chmod(0o666)
    previous = os.umask(umask)
    try:
        relay("backup", tmp_path / "copy.sqlite3")
    finally:
        os.umask(previous)
        source.chmod(mode)
    assert stat.S_IMODE((tmp_path / "copy.sqlite3").stat().st_mode) == 0o600


@pytest.mark.django_db
def test_existing_file_is_never_overwritten(relay: Relay, tmp_path: Path) -> None:
    destination = tmp_path / "copy.sqlite3"
    destination.write_text("precious")
    with pytest.raises(CommandError, match="none is overwritten"):
        relay("backup", destination)
    assert destination.read_text() == "precious"


def test_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    partial, destination = tmp_path / "partial", tmp_path / "copy"
    partial.write_text("new")
    destination.write_text("precious")
    with pytest.raises(FileExistsError):
        upkeep._name(partial, destination)
    assert destination.read_text() == "precious"


def test_file_system_without_hard_links_still_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    partial, destination = tmp_path / "partial", tmp_path / "copy"
    partial.write_text("new")
    upkeep._name(partial, destination)
    assert destination.read_text() == "new"
    partial.write_text("newer")
    with pytest.raises(FileExistsError):
        upkeep._name(partial, destination)


@pytest.mark.django_db(transaction=True)
def test_failed_backup_leaves_nothing_behind(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(upkeep, "_name", full)
    with pytest.raises(CommandError, match="left nothing behind: disk full"):
        relay("backup", tmp_path / "copy.sqlite3")
    assert os.listdir(tmp_path) == []


@pytest.mark.django_db
def test_database_that_stays_locked_ends_the_wait(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test's own transaction is the lock.
    monkeypatch.setattr(upkeep, "LOCKED_SECONDS", 0.1)
    actions.enqueue()
    with pytest.raises(CommandError, match="was locked for"):
        relay("backup", tmp_path / "copy.sqlite3")
    assert os.listdir(tmp_path) == []


@pytest.mark.django_db
def test_missing_directory_is_an_error(relay: Relay, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nowhere is no directory"):
        relay("backup", tmp_path / "nowhere" / "copy.sqlite3")


CHURN = """
from tests.store import actions
from relay_queue import store
while True:
    with store.transaction() as tx:
        store.enqueue_many(tx, [actions.job(args=[n]) for n in range(10)])
"""


def test_copy_taken_beside_a_writer_is_sound(project: Project, tmp_path: Path) -> None:
    writer = project.spawn_python(CHURN)
    wait_until(lambda: project.rows("SELECT count(*) FROM relay_queue_job")[0][0] > 50)
    copy = tmp_path / "copy.sqlite3"
    project.manage("relay", "backup", str(copy))
    assert writer.poll() is None, project.log(writer)
    restored = Project(copy, tmp_path / "restored-logs")
    assert restored.manage("relay", "verify").returncode == 0
    assert jobs_in(copy) % 10 == 0
