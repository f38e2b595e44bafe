"""A power cut at any moment loses nothing that was acked, and leaves a sound ledger."""

from __future__ import annotations

import os
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from relay_queue.db import wal
from relay_queue.db.wal import read_wal
from relay_queue.query.verify import verify
from tests.power.disk import Disk, Fate
from tests.power.recording import STAMP, Promises, Recorded, Recording

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECTORS = (512, 4096)
TORTURE_IMAGES = int(os.environ.get("RELAY_POWER_IMAGES", "20000"))

RecordLoad = Callable[[str, int], Recorded]
"""Records a load of so many rounds with this value of ``synchronous``."""


@dataclass
class Findings:
    """What was found on the images of one record."""

    cuts: int = 0
    images: int = 0
    lost: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    logs: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.cuts} cut points, {self.images} images: {len(self.lost)} with losses, "
            f"{len(self.damaged)} damaged; tails of logs: {dict(self.logs)}"
        )


class Images:
    """Opens one image after the other with the engine that Relay ships."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "image.sqlite3"

    def look(self, files: dict[str, bytes], promises: Promises, findings: Findings) -> None:
        """Put an image on the disk, open it, and hold it to what was promised."""
        connections["image"].close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        for name, content in files.items():
            Path(f"{self.path}{'-wal' if name.endswith('-wal') else ''}").write_bytes(content)
        findings.logs[read_wal(str(self.path)).tail] += 1
        findings.images += 1
        if damage := self.damage():
            findings.damaged.append(damage)
            return
        findings.damaged += [fault.message for fault in verify(None).faults] or unpaired()
        findings.lost += promises.broken(*self.ledger())[:1]

    def damage(self) -> str:
        """Return what SQLite finds wrong with the image; opening it recovers its log."""
        try:
            with closing(sqlite3.connect(self.path)) as raw:
                checks = [*raw.execute("PRAGMA integrity_check")]
                checks += raw.execute("PRAGMA foreign_key_check")
                return "; ".join(str(row) for row in checks if row != ("ok",))
        except sqlite3.Error as error:
            return repr(error)

    def ledger(self) -> tuple[dict[int, str], dict[int, tuple[int, str | None]]]:
        """Read the jobs with their states, and the leases with job and outcome."""
        jobs = dict(rows("SELECT id, state FROM relay_queue_job"))
        leases = rows("SELECT id, job_id, outcome FROM relay_queue_lease")
        return jobs, {lease: (job, outcome) for lease, job, outcome in leases}


def rows(sql: str) -> list[tuple[Any, ...]]:
    with connections["image"].cursor() as cursor:
        return cursor.execute(sql).fetchall()


def unpaired() -> list[str]:
    """Return the atomic jobs whose row is there without their ack, or the other way round."""
    written = {int(name.split()[1]) for (name,) in rows("SELECT name FROM auth_group")}
    acked = rows("SELECT id FROM relay_queue_job WHERE state = 'succeeded' AND task LIKE '%.write'")
    return [f"half of job {job}" for job in written ^ {job for (job,) in acked}]


@pytest.fixture
def images(
    tmp_path: Path, settings: Any, django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Images]:
    """Return what opens images; the queue of this process is the image meanwhile."""
    monkeypatch.setattr(wal, "PAUSE_SECONDS", 0)  # nobody writes to an image
    images = Images(tmp_path)
    connections.databases["image"] = {
        **connections.databases["default"],
        "NAME": str(images.path),
        # The images need not survive anything.
        "OPTIONS": {"init_command": "PRAGMA synchronous=OFF"},
    }
    settings.RELAY = {"DATABASE": "image"}
    with django_db_blocker.unblock():
        yield images
        connections["image"].close()
    del connections["image"]
    del connections.databases["image"]


@pytest.fixture
def record(database_file: Path, tmp_path: Path, shim: Path) -> RecordLoad:
    def play(synchronous: str, rounds: int) -> Recorded:
        recording = Recording(database_file, tmp_path / "logs", shim, synchronous)
        try:
            return recording.play(rounds)
        finally:
            recording.close()

    return play


def examine(recorded: Recorded, images: Images, count: int) -> Findings:
    """Cut the power at random moments and look at what the disk may hold then."""
    dice = random.Random(count)
    disk, promises = Disk(recorded.database, recorded.content), Promises()
    findings = Findings()
    fates = list(Fate)
    chance = count / len(fates) / len(recorded.entries)
    for entry in recorded.entries:
        if entry.kind == STAMP:
            promises.note(entry)
        else:
            disk.apply(entry)
        if not disk.unsafe or dice.random() > chance:
            continue
        findings.cuts += 1
        for fate in fates:
            images.look(disk.image(fate, dice.choice(SECTORS), dice), promises, findings)
    assert len(promises) > 50, "the load did too little to lose anything"
    return findings


def test_every_disk_that_a_power_cut_may_leave_has_all_that_was_acked(
    record: RecordLoad, images: Images
) -> None:
    findings = examine(record("FULL", 12), images, 260)
    print(findings)
    assert (findings.lost, findings.damaged) == ([], [])
    assert findings.logs["torn"], "no write was ever cut"
    assert "corrupt" not in findings.logs, "what the power cut is not taken for a bad disk"
    assert findings.images > 150, findings


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_very_many_disks_have_all_that_was_acked(record: RecordLoad, images: Images) -> None:
    findings = examine(record("FULL", 100), images, TORTURE_IMAGES)
    print(findings)
    assert (findings.lost, findings.damaged) == ([], [])
    assert "corrupt" not in findings.logs


def test_without_a_sync_at_each_commit_acked_operations_are_lost(
    record: RecordLoad, images: Images
) -> None:
    """The harness would see a loss; and the log keeps the order of commits all the same."""
    findings = examine(record("NORMAL", 6), images, 60)
    print(findings)
    assert findings.lost
    assert not findings.damaged


def test_without_any_sync_the_database_itself_is_damaged(
    record: RecordLoad, images: Images
) -> None:
    findings = examine(record("OFF", 6), images, 60)
    print(findings)
    assert findings.lost
    assert findings.damaged
