"""The suite's settings for worker processes that reach their server through a pooler."""

from typing import Any

from tests.process import settings as _direct
from tests.process.settings import *  # noqa: F403

# A copy: whoever imports this module may use the other settings itself.
DATABASES: dict[str, dict[str, Any]] = {
    "default": {**_direct.DATABASES["default"], "DISABLE_SERVER_SIDE_CURSORS": True}
}
