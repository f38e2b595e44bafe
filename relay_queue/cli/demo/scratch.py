"""The scratch folder of the demo, and the environment that makes a process use it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Final

from django.conf import settings

from relay_queue.scratch import folder

SETTINGS: Final = "relay_queue.cli.demo.settings"
VARIABLE: Final = "RELAY_DEMO_DIR"


def make_directory() -> Path:
    """Make an empty folder for a demo. Raises ``OSError`` if there is no place for one."""
    return folder.make("relay-demo-")


def current_directory() -> Path | None:
    """Return the folder of the scratch project that this process runs in; None in any other."""
    directory = os.environ.get(VARIABLE)
    return Path(directory) if directory and settings.SETTINGS_MODULE == SETTINGS else None


def environment(directory: Path) -> dict[str, str]:
    """Return the variables under which a process sees the scratch project in ``directory``."""
    return {
        VARIABLE: str(directory),
        "DJANGO_SETTINGS_MODULE": SETTINGS,
        "PYTHONPATH": folder.python_path(),
    }


def command(directory: Path, verb: str) -> str:
    """Return the shell command that runs a verb of ``relay`` on the scratch project."""
    python = shlex.quote(sys.executable)
    variable = f"{VARIABLE}={shlex.quote(str(directory))}"
    return f"{variable} {python} -m django relay {verb} --settings {SETTINGS}"
