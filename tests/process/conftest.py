"""The farm: a project with real workers on the test database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connection

from relay_queue.store.verify import verify
from tests.process import settings as process_settings
from tests.process.farm import Farm
from tests.store.actions import empty


@pytest.fixture
def transactional_db(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Real transactions that commit; afterwards the tables that chores write are emptied."""
    with django_db_blocker.unblock():
        yield
        Group.objects.all().delete()
        empty()


@pytest.fixture
def farm(transactional_db: None, settings: Any, tmp_path: Path) -> Iterator[Farm]:
    """Return the farm; at the end its processes are gone and the ledger holds."""
    settings.TASKS = process_settings.TASKS
    farm = Farm(Path(connection.settings_dict["NAME"]), tmp_path)
    yield farm
    farm.close()
    found = verify(None)
    assert not found.faults, found.faults
