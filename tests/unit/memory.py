"""The suite's settings on a database in memory, as many projects run their tests."""

import os
from typing import Any

from tests.settings import *  # noqa: F403

DATABASES: dict[str, dict[str, Any]] = {
    "default": {"ENGINE": os.environ["RELAY_MEMORY_ENGINE"], "NAME": ":memory:"}
}
