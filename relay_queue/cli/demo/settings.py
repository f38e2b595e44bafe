"""Settings of the demo's scratch project.

``RELAY_DEMO_DIR`` names its folder. Without it there is no database at all: a process that is not
part of a demo has nothing to touch.
"""

import os
from pathlib import Path
from typing import Any

from relay_queue.cli.demo.scratch import VARIABLE

_directory = os.environ.get(VARIABLE)

SECRET_KEY = "of a scratch project that signs nothing"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["relay_queue"]

DATABASES: dict[str, dict[str, Any]] = {}
if _directory:
    DATABASES["default"] = {
        "ENGINE": "relay_queue.db.sqlite3",
        "NAME": Path(_directory) / "relay.sqlite3",
    }

_queues = ["default", "mail", "reports", "media"]

TASKS = {"default": {"BACKEND": "relay_queue.backend.RelayBackend", "QUEUES": _queues}}

RELAY = {"QUEUES": _queues}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} [{process}] {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"relay_queue": {"handlers": ["console"], "level": "INFO", "propagate": False}},
}
