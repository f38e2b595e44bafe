"""Settings of processes that run the next release."""

from tests.process.settings import *  # noqa: F403

MIGRATION_MODULES = {"relay_queue": "tests.process.upgraded.migrations"}
