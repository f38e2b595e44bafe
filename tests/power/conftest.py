"""The compiled shim."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.power.shim import compile_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled shim; skips if it cannot be compiled here."""
    return compile_shim(tmp_path_factory.mktemp("shim"))
