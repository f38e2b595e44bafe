"""Settings of a row's scratch project.

``RELAY_DRILL_DIR`` names its folder. Without it there is no database at all: a process that is not
part of a drill has nothing to touch. Where the drill uses a server, ``RELAY_DRILL_SERVER`` says which,
as JSON, and ``RELAY_DRILL_DB`` names the row's database there.
"""

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "RELAY_DRILL_DIR"
SERVER_VARIABLE = "RELAY_DRILL_SERVER"
DATABASE_VARIABLE = "RELAY_DRILL_DB"

_directory = os.environ.get(VARIABLE)
_server = os.environ.get(SERVER_VARIABLE)

SECRET_KEY = "of a scratch project that signs nothing"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Sessions are the plain table that functions write.
INSTALLED_APPS = ["django.contrib.sessions", "relay_queue"]

DATABASES: dict[str, dict[str, Any]] = {}
if _directory and _server:
    DATABASES["default"] = {**json.loads(_server), "NAME": os.environ[DATABASE_VARIABLE]}
elif _directory:
    DATABASES["default"] = {
        "ENGINE": "relay_queue.db.sqlite3",
        "NAME": Path(_directory) / "relay.sqlite3",
    }

TASKS = {"default": {"BACKEND": "relay_queue.backend.RelayBackend", "QUEUES": []}}

# Nothing is found by looking now and then: what ought to be told must be.
RELAY: dict[str, Any] = {"POLL_SECONDS": 300, "SHUTDOWN_TIMEOUT_SECONDS": 2}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} [{process}] {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"relay_queue": {"handlers": ["console"], "level": "INFO", "propagate": False}},
}
