"""The suite's settings for worker processes, with what a test wants of Relay in the environment."""

import json
import os
from typing import Any

from tests.settings import *  # noqa: F403
from tests.settings import TASKS as _TASKS

RELAY_VARIABLE = "RELAY_TEST_SETTINGS"

TASKS: dict[str, Any] = {**_TASKS, "other": _TASKS["default"]}
RELAY: dict[str, Any] = json.loads(os.environ.get(RELAY_VARIABLE, "{}"))

# When a supervisor has passed on the order to stop is seen by what it says.
LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"relay_queue.supervisor": {"handlers": ["console"], "level": "INFO"}},
}
