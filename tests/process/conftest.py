"""The farm: a project with real workers on the test database, of one engine or another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connection

from relay_queue.query.verify import verify
from tests.postgresql import default_is
from tests.process import settings as process_settings
from tests.process.farm import Farm
from tests.store.actions import empty


@pytest.fixture
def engine() -> str:
    """Name the engine of the farm; tests for more than one are marked with `on_each_engine`."""
    return "sqlite"


@pytest.fixture
def transactional_db(
    engine: str, request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: Any
) -> Iterator[None]:
    """Real transactions that commit; afterwards the tables that chores write are emptied."""
    with django_db_blocker.unblock():
        if engine == "sqlite":
            yield
            Group.objects.all().delete()
            empty()
        else:
            with default_is(request.getfixturevalue("postgresql_url")):
                yield


@pytest.fixture
def database(engine: str, transactional_db: None, request: pytest.FixtureRequest) -> Path | str:
    """Return the test database: a file, or an address of PostgreSQL."""
    if engine == "sqlite":
        return Path(connection.settings_dict["NAME"])
    return str(request.getfixturevalue("postgresql_url"))


@pytest.fixture
def farm(database: Path | str, settings: Any, tmp_path: Path) -> Iterator[Farm]:
    """Return the farm; at the end its processes are gone and the ledger holds."""
    settings.TASKS = process_settings.TASKS
    farm = Farm(database, tmp_path)
    yield farm
    farm.close()
    found = verify(None)
    assert not found.faults, found.faults
