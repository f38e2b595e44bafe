"""One scratch database for all simulations of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.simulation.scratch import Scratch, scratch


@pytest.fixture(scope="module")
def database(django_db_blocker: Any) -> Iterator[Scratch]:
    """Return a scratch database of its own, beside that of the suite."""
    with django_db_blocker.unblock(), scratch() as made:
        yield made
