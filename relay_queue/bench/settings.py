"""Settings of the scratch project. ``RELAY_BENCH_DB`` names its database file."""

import json
import os
from typing import Any

SECRET_KEY = "of a database that lives for minutes"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# The engine as it comes: write-ahead log and synchronous=FULL. Weaker settings would flatter.
DATABASES: dict[str, dict[str, Any]] = {
    "default": {"ENGINE": "relay_queue.db.sqlite3", "NAME": os.environ["RELAY_BENCH_DB"]}
}
# Or a server, where one is measured.
if "RELAY_BENCH_SERVER" in os.environ:
    DATABASES["default"] = {
        **json.loads(os.environ["RELAY_BENCH_SERVER"]),
        "NAME": os.environ["RELAY_BENCH_DB"],
    }

# Sessions are the plain table that a program beside the workers writes.
INSTALLED_APPS = ["django.contrib.sessions", "relay_queue"]

TASKS = {"default": {"BACKEND": "relay_queue.backend.RelayBackend", "QUEUES": []}}
RELAY: dict[str, Any] = {}
