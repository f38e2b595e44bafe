"""Scratch databases on a server: made as the settings need them, and gone after the block."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from django.db import ProgrammingError

from relay_queue.lab.server import Server
from tests import postgresql


@pytest.fixture(autouse=True)
def connections_allowed(django_db_blocker: Any) -> Iterator[None]:
    with django_db_blocker.unblock():
        yield


def test_a_database_is_there_for_the_length_of_a_block_and_its_visitors_are_cut_off(
    postgresql_server: postgresql.Server,
) -> None:
    server, name = Server(postgresql_server.settings("postgres") | {"OPTIONS": {}}), unique()
    with server.database(name):
        visitor = psycopg.connect(postgresql_server.url(name), autocommit=True)
    with closing(visitor), pytest.raises(psycopg.OperationalError):
        visitor.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(postgresql_server.url(name))
    server.drop(name)  # one that is gone already


def test_a_database_has_the_schema_that_the_settings_choose(
    postgresql_server: postgresql.Server,
) -> None:
    settings = postgresql_server.settings("postgres")
    settings["OPTIONS"] = {"options": '-c search_path="shop"'}
    server, name = Server.of_json(Server(settings).as_json()), unique()
    with server.database(name), psycopg.connect(postgresql_server.url(name)) as visitor:
        assert visitor.execute("SELECT to_regnamespace('shop')::text").fetchone() == ("shop",)


def test_a_database_that_was_there_before_is_not_dropped(
    postgresql_server: postgresql.Server,
) -> None:
    server, name = Server(postgresql_server.settings("postgres") | {"OPTIONS": {}}), unique()
    with server.database(name):
        with pytest.raises(ProgrammingError, match="already exists"), server.database(name):
            pass
        psycopg.connect(postgresql_server.url(name)).close()


def unique() -> str:
    return f"scratch_{uuid.uuid4().hex}"
