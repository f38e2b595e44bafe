"""Settings of a project whose queue is in a file of its own, and a way to run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.settings import *  # noqa: F403

DIRECTORY = Path(os.environ.get("RELAY_TEST_DIRECTORY", "."))
ENGINE = "relay_queue.db.sqlite3"

DATABASES: dict[str, dict[str, Any]] = {
    "default": {"ENGINE": ENGINE, "NAME": DIRECTORY / "rows.sqlite3"},
    "queue": {"ENGINE": ENGINE, "NAME": DIRECTORY / "queue.sqlite3"},
}
DATABASE_ROUTERS = [f"{__name__}.QueueRouter"]
RELAY = {"DATABASE": "queue"}
TASKS = {
    "default": {
        "BACKEND": "relay_queue.backend.RelayBackend",
        "OPTIONS": {"enqueue_on_commit": True},
    }
}


class QueueRouter:
    """Keeps the tables of Relay, and nothing else, in the database ``queue``."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "queue" if model._meta.app_label == "relay_queue" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return (app_label == "relay_queue") == (db == "queue")


class Dedicated:
    """The project in a directory, run as processes."""

    def __init__(self, directory: Path) -> None:
        self.environment = {
            **os.environ,
            "RELAY_TEST_DIRECTORY": str(directory),
            "DJANGO_SETTINGS_MODULE": __name__,
        }

    def manage(self, *arguments: str) -> str:
        """Run a command of ``manage.py`` to its end and return its output."""
        return self._run("-m", "django", *arguments)

    def python(self, source: str) -> str:
        """Run ``source`` with Django set up and return its output."""
        return self._run("-c", f"import django; django.setup()\n{source}")

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=self.environment,
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout
