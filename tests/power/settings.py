"""Settings of the processes whose writes are recorded: SQLite set up as the test asks."""

import os

from tests.power import INIT_VARIABLE
from tests.process.settings import *  # noqa: F403
from tests.process.settings import DATABASES

DATABASES["default"]["OPTIONS"] = {"init_command": os.environ.get(INIT_VARIABLE, "")}
