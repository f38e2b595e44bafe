"""Where the jobs of bulk acts are enqueued: an alias of ``TASKS`` of Relay, and a queue of it."""

from __future__ import annotations

from django.conf import settings

from relay_queue import conf
from relay_queue.backend import RelayBackend
from relay_queue.compat import DEFAULT_TASK_QUEUE_NAME, task_backends
from relay_queue.exceptions import ConfigurationError


def destination() -> tuple[str, str]:
    """Return the alias and the queue. Raises `ConfigurationError` if no alias or queue serves."""
    alias = conf.get().acts_backend or _first_alias()
    if alias not in settings.TASKS or not isinstance(task_backends[alias], RelayBackend):
        raise ConfigurationError(
            f'RELAY["ACTS_BACKEND"] is {alias!r}, which is no alias of TASKS that Relay backs.'
        )
    admitted = list(settings.TASKS[alias].get("QUEUES", [DEFAULT_TASK_QUEUE_NAME]))
    queue = conf.get().acts_queue or _first_queue(admitted)
    if admitted and queue not in admitted:
        raise ConfigurationError(
            f'RELAY["ACTS_QUEUE"] is {queue!r}, which TASKS[{alias!r}] does not admit; '
            f"its QUEUES are {', '.join(admitted)}."
        )
    return alias, queue


def _first_alias() -> str:
    for alias in settings.TASKS:
        if isinstance(task_backends[alias], RelayBackend):
            return str(alias)
    raise ConfigurationError("No alias of TASKS is backed by Relay, so nobody would do bulk acts.")


def _first_queue(admitted: list[str]) -> str:
    known = admitted or list(conf.get().queues or [DEFAULT_TASK_QUEUE_NAME])
    return DEFAULT_TASK_QUEUE_NAME if DEFAULT_TASK_QUEUE_NAME in known else known[0]
