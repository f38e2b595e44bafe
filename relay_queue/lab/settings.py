"""The settings of every scratch project, and the variables of the environment that tell them apart.

Without a folder there is no database at all: a process that is not part of a scratch project has
nothing to touch.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

DIRECTORY_VARIABLE: Final = "RELAY_LAB_DIR"
"""Names the folder of the scratch project."""

SERVER_VARIABLE: Final = "RELAY_LAB_SERVER"
"""Names a server, as an entry of ``DATABASES`` in JSON, where the database is not in the folder."""

DATABASE_VARIABLE: Final = "RELAY_LAB_DB"
"""Names the database on the server."""

USE_VARIABLE: Final = "RELAY_LAB_USE"
"""Names what the project is for: ``demo``, ``drill``, ``bench``, or ``console``: bench with the admin."""

DATABASE: Final = "relay.sqlite3"
"""The file of the database in the folder."""

_directory = os.environ.get(DIRECTORY_VARIABLE)
_server = os.environ.get(SERVER_VARIABLE)
_use = os.environ.get(USE_VARIABLE, "demo")

SECRET_KEY = "of a scratch project that signs nothing"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

DATABASES: dict[str, dict[str, Any]] = {}
if _directory and _server:
    # Never the database that the entry names: that is the project's own.
    DATABASES["default"] = {**json.loads(_server), "NAME": os.environ[DATABASE_VARIABLE]}
elif _directory:
    # The engine as it comes: write-ahead log and synchronous=FULL. Weaker settings would flatter.
    DATABASES["default"] = {
        "ENGINE": "relay_queue.db.sqlite3",
        "NAME": Path(_directory) / DATABASE,
    }

# Sessions are the plain table that functions, and programs beside the workers, write.
INSTALLED_APPS = ["django.contrib.sessions", "relay_queue", "relay_queue.lab"]
if _use == "console":
    # Only there: workers do not need them, and their memory is measured without.
    INSTALLED_APPS += [
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "django.contrib.staticfiles",
        "rangefilter",
    ]
    ROOT_URLCONF = "relay_queue.lab.bench.console"

TASKS = {"default": {"BACKEND": "relay_queue.backend.RelayBackend", "QUEUES": []}}

RELAY: dict[str, Any] = {}
LOGGING: dict[str, Any] = {}
if _use == "drill":
    # A drill finds nothing by looking now and then: workers must be told what they ought to be told.
    RELAY = {"POLL_SECONDS": 300, "SHUTDOWN_TIMEOUT_SECONDS": 2}
if _use in {"demo", "drill"}:
    LOGGING = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {"format": "{asctime} {levelname} [{process}] {message}", "style": "{"}
        },
        "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {"relay_queue": {"handlers": ["console"], "level": "INFO", "propagate": False}},
    }

ALLOWED_HOSTS = ["testserver"]
STATIC_URL = "static/"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]
