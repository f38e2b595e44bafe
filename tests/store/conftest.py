"""The engines that the contract suite runs on, and the clock that it moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from relay_queue import clock
from tests.store.actions import Wall, empty

ENGINES = {"sqlite": "default", "postgresql": "postgresql"}
"""Each engine that the store supports, and the alias of `DATABASES` that the suite uses for it."""


@pytest.fixture
def transactional_db(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Real transactions that commit; afterwards the tables of the queue are emptied.

    It stands in for the fixture of that name, which flushes the tables of every app: that costs
    more than most tests here.
    """
    with django_db_blocker.unblock():
        yield
        empty()


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest, settings: Any, transactional_db: None) -> Iterator[str]:
    """Run the test on one engine, named so in its id. One that is missing is reported loudly."""
    if request.param == "postgresql":
        request.getfixturevalue("postgresql_alias")
    settings.RELAY = {**settings.RELAY, "DATABASE": ENGINES[request.param]}
    yield str(request.param)
    if request.param != "sqlite":  # whose tables are emptied by `transactional_db`
        empty()


@pytest.fixture
def wall(engine: str) -> Iterator[Wall]:
    """Return the clock of the store, which stands still until the test moves it."""
    wall = Wall()
    with clock.use(wall):
        yield wall
