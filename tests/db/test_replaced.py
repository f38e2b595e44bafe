"""Another file at the path of the database: whoever has the old one open writes nothing more."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, transaction

from relay_queue.db import gatefile, replaced
from relay_queue.db.gate import gate_for
from relay_queue.store.dialects import dialect_for
from tests.db.conftest import DJANGOS_ENGINE, ENGINE, is_locked

Connect = Callable[..., Any]

EXCHANGES = ["rename", "remove", "remove and make", "link"]


def plain(path: Path, *statements: str) -> list[Any]:
    """Run statements with the standard library alone and return the rows of the last."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            rows = connection.execute(statement).fetchall()
    return rows


def exchange(database: Path, how: str) -> None:
    """Put another database in the place of this one, without its log, as a restored backup is."""
    other = database.with_name("other.db")
    plain(other, "CREATE TABLE t (n INTEGER)", "INSERT INTO t VALUES (77)")
    if how == "rename":
        other.rename(database)
    elif how == "link":
        database.unlink()
        database.symlink_to(other)
    else:
        # Kept under another name, so that its inode is not given to the new one.
        database.rename(database.with_name("gone.db"))
        if how == "remove and make":
            shutil.copy(other, database)


def aside(database: Path) -> list[Path]:
    return sorted(database.parent.glob(f"{database.name}{replaced.ASIDE}*"))


WRITES: dict[str, Callable[[Any], Any]] = {
    "statement": lambda c: c.cursor().execute("INSERT INTO t VALUES (1)"),
    "many": lambda c: c.cursor().executemany("INSERT INTO t VALUES (%s)", [(1,)]),
    "block": lambda c: transaction.atomic(using=c.alias).__enter__(),
    "store": lambda c: dialect_for(c).begin(c, None, first=False).__enter__(),
    "look": lambda c: dialect_for(c).check_file(c),
}


@pytest.mark.parametrize("how", EXCHANGES)
@pytest.mark.parametrize("way", WRITES)
def test_a_write_to_a_file_that_is_no_longer_at_its_path_is_refused(
    connection: Any, database: Path, gate_path: Path, way: str, how: str
) -> None:
    exchange(database, how)
    with pytest.raises(OperationalError, match="after this process had opened it") as raised:
        WRITES[way](connection)
    assert str(database) in str(raised.value)
    assert dialect_for(connection).diagnose(raised.value) == "replaced"
    assert not connection.in_atomic_block
    assert not is_locked(gate_path)


@pytest.mark.parametrize("way", ["store", "look"])
def test_the_store_refuses_it_on_djangos_own_engine_too(
    connection: Any, connect: Connect, database: Path, way: str
) -> None:
    django = connect(engine=DJANGOS_ENGINE)
    django.ensure_connection()
    exchange(database, "rename")
    with pytest.raises(OperationalError, match="was replaced") as raised:
        WRITES[way](django)
    assert dialect_for(django).diagnose(raised.value) == "replaced"


def test_a_connection_that_django_keeps_open_ends_with_its_request(
    connection: Any, database: Path
) -> None:
    exchange(database, "rename")
    with pytest.raises(OperationalError):
        WRITES["statement"](connection)
    connection.close_if_unusable_or_obsolete()
    WRITES["statement"](connection)
    assert plain(database, "SELECT n FROM t") == [(77,), (1,)]


@pytest.mark.parametrize("how", ["rename", "remove and make"])
def test_the_log_of_the_old_file_does_not_meet_the_new_one(
    connection: Any, connect: Connect, database: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(200):
        connection.cursor().execute("INSERT INTO t VALUES (%s)", [n])
    log = os.stat(f"{database}-wal")
    exchange(database, how)
    new = connect()
    with new.cursor() as cursor:
        cursor.execute("INSERT INTO t VALUES (78)")
        cursor.execute("SELECT n FROM t")
        assert cursor.fetchall() == [(77,), (78,)]
        cursor.execute("PRAGMA integrity_check")
        assert cursor.fetchall() == [("ok",)]
    (kept,) = aside(database)
    assert os.stat(kept).st_ino == log.st_ino
    assert kept.name in caplog.text
    with pytest.raises(OperationalError):
        WRITES["statement"](connection)
    connect().ensure_connection()
    assert len(aside(database)) == 1


def test_a_log_left_by_a_killed_process_goes_with_its_own_file(
    connect: Connect, database: Path
) -> None:
    """The file is the same, so what was committed last is only in the log, and must be found."""
    source = (
        "import os, sys, django\n"
        "from django.conf import settings\n"
        "settings.configure(DATABASES={'default': {'ENGINE': sys.argv[1], 'NAME': sys.argv[2]}})\n"
        "django.setup()\n"
        "from django.db import connection\n"
        "with connection.cursor() as cursor:\n"
        "    cursor.execute('CREATE TABLE t (n INTEGER)')\n"
        "    cursor.execute('INSERT INTO t VALUES (5)')\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", source, ENGINE, database], check=True, timeout=120)
    assert os.stat(f"{database}-wal").st_size > 0
    assert gate_for(database)._file.read_log_owner() is not None
    with connect().cursor() as cursor:
        cursor.execute("SELECT n FROM t")
        assert cursor.fetchall() == [(5,)]
    assert aside(database) == []


@pytest.mark.parametrize("why", ["another boot", "another log", "copied with it", "no note"])
def test_a_log_that_is_not_surely_foreign_stays(
    connection: Any, database: Path, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.cursor().execute("INSERT INTO t VALUES (1)")
    gate = gate_for(database)
    where = database
    if why == "copied with it":
        where = tmp_path / "copy" / database.name
        where.parent.mkdir()
        for path in database.parent.glob(f"{database.name}*"):
            shutil.copy(path, where.parent)
    else:
        exchange(database, "rename")
        assert gate.has_foreign_log()
    if why == "another boot":
        monkeypatch.setattr(gatefile, "_boot_id", lambda: "other")
    elif why == "another log":
        shutil.copy(f"{database}-wal", tmp_path / "log")
        (tmp_path / "log").rename(f"{database}-wal")
    elif why == "no note":
        os.truncate(f"{database}-gate-next", 0)
    assert not gate_for(where).has_foreign_log()


def test_a_log_is_forgotten_once_sqlite_has_taken_it_away(
    connection: Any, connect: Connect, database: Path
) -> None:
    """The system may give its inode to the log of the next file, which must stay."""
    connection.cursor().execute("INSERT INTO t VALUES (1)")
    gate = gate_for(database)
    assert gate._file.read_log_owner() is not None
    connection.close()
    assert not os.path.exists(f"{database}-wal")
    assert gate._file.read_log_owner() is None


def test_a_log_with_the_inode_of_another_is_another_log(
    connection: Any, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.cursor().execute("INSERT INTO t VALUES (1)")
    gate = gate_for(database)
    exchange(database, "rename")
    assert gate.has_foreign_log()

    def next_generation(descriptor: int, request: int, buffer: bytes) -> bytes:
        assert request == gatefile.GET_GENERATION
        return b"\x07" * len(buffer)

    monkeypatch.setattr(gatefile.fcntl, "ioctl", next_generation)
    assert not gate.has_foreign_log()


def test_two_logs_put_aside_in_one_second_are_both_kept(database: Path) -> None:
    for content in (b"first", b"second"):
        Path(f"{database}-wal").write_bytes(content)
        replaced.put_log_aside(str(database))
    assert sorted(path.read_bytes() for path in aside(database)) == [b"first", b"second"]


def test_a_log_that_cannot_be_put_aside_is_not_used(
    connection: Any, connect: Connect, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.cursor().execute("INSERT INTO t VALUES (1)")
    exchange(database, "rename")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OperationalError, match="belongs to another file"):
        connect().ensure_connection()
