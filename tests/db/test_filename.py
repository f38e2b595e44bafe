"""A relative name is made absolute once, before anybody can change the working directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from relay_queue.db.filename import file_of, make_absolute, make_all_absolute
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
