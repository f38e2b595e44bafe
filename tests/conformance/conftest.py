"""What the conformance tests share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings

from relay_queue.compat import Task, signals

RELAY = "relay_queue.backend.RelayBackend"

Aliases = Callable[..., AbstractContextManager[None]]


@pytest.fixture(scope="session")
def framework() -> ModuleType:
    """Return ``django.tasks`` or ``django_tasks``."""
    return importlib.import_module(Task.__module__.rpartition(".")[0])


@pytest.fixture
def aliases() -> Aliases:
    """Return a context manager that sets ``TASKS``: one keyword for each alias that Relay backs."""

    def use(**options: dict[str, Any]) -> AbstractContextManager[None]:
        tasks = {
            alias: {"BACKEND": RELAY, "QUEUES": [], **params} for alias, params in options.items()
        }
        return override_settings(TASKS=tasks)

    return use


@pytest.fixture
def sent() -> Iterator[list[tuple[str, type, Any]]]:
    """Return a list of the signals sent: name, sender, status at that moment and result."""
    seen: list[Any] = []
    receivers = {}
    for name in ("task_enqueued", "task_started", "task_finished"):

        def receive(sender: type, task_result: Any, name: str = name, **kwargs: Any) -> None:
            seen.append((name, sender, task_result.status, task_result))

        receivers[name] = receive
        getattr(signals, name).connect(receive)
    yield seen
    for name, receive in receivers.items():
        getattr(signals, name).disconnect(receive)


@pytest.fixture
def rows(transactional_db: None, tmp_path: Path) -> Iterator[Any]:
    """Return a connection to a second database, ``rows``, for a queue that is not beside its rows."""
    configured = connections.configure_settings(
        {
            "default": {},
            "rows": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(tmp_path / "rows.sqlite3"),
            },
        }
    )
    connections.settings["rows"] = configured["rows"]
    connection = connections["rows"]
    connection.connect()  # by hand: a test may open only the databases that the settings had
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE row (name text)")
    yield connection
    connection.close()
    del connections["rows"], connections.settings["rows"]
