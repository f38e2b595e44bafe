"""The Django application: checks, and the queues that the settings name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.apps import AppConfig
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _

from relay_queue.logs import get_logger

logger = get_logger("relay_queue")


class RelayConfig(AppConfig):
    """Registers the system checks, and creates the configured queues after ``migrate``."""

    name = "relay_queue"
    label = "relay_queue"
    verbose_name = _("Relay")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Connect what cannot be imported before the models are ready."""
        from relay_queue import checks

        # The task framework registers its checks, which ask our backends (E006), when it is
        # imported; a project that has imported no task yet would go unchecked.
        import_module("relay_queue.compat")
        import_module("relay_queue.wakeup")  # it tells the store how workers are woken
        checks.register()
        connection_created.connect(remember_file, dispatch_uid="relay_queue.apps")
        post_migrate.connect(tune_storage, sender=self)
        post_migrate.connect(create_configured_queues, sender=self)
        post_migrate.connect(sync_schedules, sender=self)


def remember_file(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    """Note which file a connection of Django's own SQLite engine has opened; ours does so itself."""
    from relay_queue.db import replaced

    if hasattr(connection, "is_in_memory_db"):
        replaced.remember(connection)


def tune_storage(using: str, **kwargs: Any) -> None:
    """Set how the tables of the queue are stored, on the queue's database."""
    from relay_queue import conf
    from relay_queue.store.dialects import dialect_for

    if using == conf.get().database:
        dialect_for(connections[using]).tune(connections[using])


def create_configured_queues(using: str, **kwargs: Any) -> None:
    """Create the rows of the queues that ``RELAY["QUEUES"]`` names, on the queue's database."""
    from relay_queue import conf, store

    settings = conf.get()
    if using != settings.database or settings.queues is None or not _has("Queue", **kwargs):
        return
    with store.transaction() as tx:
        for name in settings.queues:
            store.ensure_queue(tx, name)


def sync_schedules(using: str, **kwargs: Any) -> None:
    """Make the schedules in the table what the code declares, on the queue's database.

    A declaration that makes no sense keeps no migration from being applied: it is logged.
    """
    from relay_queue import conf, schedules
    from relay_queue.exceptions import InvalidSchedule

    settings = conf.get()
    if using != settings.database or settings.sync != "migrate" or not _has("Schedule", **kwargs):
        return
    try:
        schedules.sync()
    except InvalidSchedule as error:
        logger.error("Schedules are as they were: %s. Then run relay schedules sync.", error)


def _has(model: str, **kwargs: Any) -> bool:
    """Say whether the database has the table of a model: ``migrate relay_queue zero`` leaves none."""
    state = kwargs.get("apps")  # flush, which leaves the tables as they are, tells none
    return state is None or model.lower() in state.all_models["relay_queue"]
