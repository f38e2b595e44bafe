"""Relay: durable background jobs for Django with no broker to run.

The names below are the public ones; ``docs/api.md`` describes them. They are looked up when they are
first used, so that importing the package costs nothing and works before the settings are known.
"""

# ruff: noqa: F403, F405 - a test looks each name of `__all__` up

TYPE_CHECKING = False  # type checkers take it for true; `typing` would cost more than all the rest

if TYPE_CHECKING:
    from relay_queue.api import *  # `__all__` says which of these names are public
    from relay_queue.context import JobContext, RelayContext, current_context
    from relay_queue.ranking import Priority
    from relay_queue.results import EnqueuedResults
    from relay_queue.states import State
    from relay_queue.store.records import Changed

__version__ = "0.1.0"

__all__ = [
    "AnyJob",
    "Changed",
    "EnqueuedResults",
    "JobContext",
    "JobInfo",
    "Priority",
    "RelayContext",
    "State",
    "acancel",
    "acancel_many",
    "adelete_queue",
    "adiscard",
    "adiscard_many",
    "aenqueue_many",
    "aget_job",
    "apause",
    "arelease",
    "arelease_many",
    "arequeue",
    "arequeue_many",
    "aresume",
    "arun_now",
    "arun_now_many",
    "aset_limits",
    "aset_priority",
    "aset_priority_many",
    "await_for",
    "cancel",
    "cancel_many",
    "current_context",
    "delete_queue",
    "discard",
    "discard_many",
    "enqueue_many",
    "get_job",
    "pause",
    "release",
    "release_many",
    "requeue",
    "requeue_many",
    "resume",
    "run_now",
    "run_now_many",
    "set_limits",
    "set_priority",
    "set_priority_many",
    "wait_for",
]

_NOT_IN_API = {
    "Changed": "relay_queue.store.records",
    "EnqueuedResults": "relay_queue.results",
    "JobContext": "relay_queue.context",
    "Priority": "relay_queue.ranking",
    "RelayContext": "relay_queue.context",
    "State": "relay_queue.states",
    "current_context": "relay_queue.context",
}

if not TYPE_CHECKING:  # a checker that saw it would take any name for one of ours

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_NOT_IN_API.get(name, "relay_queue.api")), name)
        globals()[name] = value  # the next look finds it without asking here
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
