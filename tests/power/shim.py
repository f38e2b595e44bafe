"""The shim between SQLite and the system: compiled when a test first needs it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("shim.c")


def compile_shim(directory: Path) -> Path:
    """Compile the shim and return its path. Skips the test if there is no C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if platform.system() != "Linux":
        pytest.skip("NOT TESTED: the shim speaks to Linux")
    if compiler is None:
        pytest.skip("NOT TESTED: no C compiler (cc, gcc, clang) compiles the shim under SQLite")
    library = directory / "shim.so"
    command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


def variables(library: Path, database: Path) -> dict[str, str]:
    """Return the environment of processes whose SQLite goes through the shim."""
    return {"LD_PRELOAD": str(library), "RELAY_SHIM_DATABASE": str(database.resolve())}


def faults(library: Path, database: Path, orders: str) -> dict[str, str]:
    """Return the same for processes whose writes or syncs fail while the file ``orders`` exists.

    It holds ``write`` or ``sync`` and the number of the error.
    """
    return {**variables(library, database), "RELAY_SHIM_FAULT": orders}
