"""A relative name is made absolute once, before anybody can change the working directory."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from relay_queue.db.filename import file_of, file_of_connection, make_absolute, make_all_absolute
from relay_queue.db.gate import gate_for, gate_of
from tests.db.conftest import DJANGOS_ENGINE, ENGINE


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("some.db", "{here}/some.db"),
        (Path("below/some.db"), "{here}/below/some.db"),
        ("../some.db", "{above}/some.db"),
        ("file:some.db", "{here}/some.db"),
        ("file:some%20one.db?mode=rw&cache=private", "{here}/some one.db"),
        ("/var/some.db", "/var/some.db"),
        ("file:///var/some.db?mode=rw", "/var/some.db"),
    ],
)
def test_a_name_leads_to_the_same_file_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | Path, expected: str
) -> None:
    here = tmp_path / "50% of it? #1"
    here.mkdir()
    monkeypatch.chdir(here)
    settings = {"NAME": name}
    make_absolute(settings)
    monkeypatch.chdir("/")
    assert type(settings["NAME"]) is type(name)
    found = file_of(str(settings["NAME"]))
    assert os.path.normpath(found) == expected.format(here=here, above=tmp_path)


@pytest.mark.parametrize("name", [":memory:", "", "file:shared?mode=memory&cache=shared"])
def test_a_database_in_memory_keeps_its_name(name: str) -> None:
    settings = {"NAME": name}
    make_absolute(settings)
    assert settings == {"NAME": name}


@pytest.mark.parametrize(
    "name",
    [
        "plain.db",
        "FILE:plain.db",
        "file:a.db",
        "file:below/a.db?mode=rwc",
        "file:{here}/a.db?cache=private",
        "file://{here}/a.db",
        "file://localhost{here}/a.db",
        "file:a%20b%3fc%23d.db",
        "file:a+b.db?mode=rwc",
        "file:%ff.db",
        "file:bad%zz%4",
        "file:a.db%00b",
        "file:a.db#part?mode=memory",
        "file:a.db?xmode=memory",
        "file:a.db?mode=rwc&x=mode=memory",
        "file:a.db??mode=memory",
        "file:a.db?mode=memory&mode=rwc",
        "file:a.db?mode=rwc&mode=memory",
        "file:a.db?mo%64e=mem%6fry",
        "file:a.db?mode=memory%00x",
        "file:a.db?&mode=memory&",
        "file:/a?vfs=memdb",
        "file:a?vfs=memdb",
        "file::memory:?cache=shared",
        "file:?mode=rwc",
        "file:",
        ":memory:",
        "",
    ],
)
def test_the_file_of_a_name_is_the_one_that_sqlite_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    name = name.format(here=tmp_path)
    with closing(sqlite3.connect(name, uri=True)) as connection:
        connection.execute("CREATE TABLE t (n INTEGER)")
    made = [os.path.join(at, file) for at, _, found in os.walk(tmp_path) for file in found]
    path = file_of(name)
    assert made == ([] if path is None else [os.path.abspath(path)])


def test_an_authority_that_sqlite_refuses_is_left_out(tmp_path: Path) -> None:
    name = f"file://host{tmp_path}/a.db"
    assert file_of(name) == f"{tmp_path}/a.db"
    with pytest.raises(sqlite3.OperationalError, match="authority"):
        sqlite3.connect(name, uri=True)


@pytest.mark.parametrize("engine", [ENGINE, DJANGOS_ENGINE])
@pytest.mark.parametrize(
    "name", ["{here}/a.db", "file://localhost{here}/a.db?mode=rwc", "file:/a?vfs=memdb", ":memory:"]
)
def test_gate_and_bell_are_beside_the_same_file(
    connect: Callable[..., Any], tmp_path: Path, engine: str, name: str
) -> None:
    connection = connect(name=name.format(here=tmp_path), engine=engine)
    path, gate = file_of_connection(connection), gate_of(connection)
    assert path == file_of(name.format(here=tmp_path))
    assert (gate is None) == (path is None)
    if gate is not None:
        assert gate is gate_for(str(path))


@pytest.mark.parametrize("engine", [ENGINE, DJANGOS_ENGINE])
@pytest.mark.parametrize("name", ["relative.db", "file:relative.db?mode=rwc"])
def test_connections_opened_after_chdir_have_the_same_file(
    connect: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    connection = connect(name=name, engine=engine)
    make_all_absolute(connections.all())
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE t (n INTEGER)")
    connection.close()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with connection.copy().cursor() as cursor:
        cursor.execute("SELECT count(*) FROM t")
        assert cursor.fetchall() == [(0,)]
        cursor.connection.close()
    assert os.listdir(tmp_path / "elsewhere") == []
