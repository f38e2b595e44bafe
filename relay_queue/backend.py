"""The front door: Django's task backend that stores jobs in the database.

Signals are sent robustly. An enqueue that has committed must not raise because a receiver did: the
caller would enqueue again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any, Final

from asgiref.sync import sync_to_async

from relay_queue import conf, store
from relay_queue.backoff import Backoff
from relay_queue.compat import (
    AnyResult,
    AnyTask,
    BaseTaskBackend,
    InvalidTask,
    InvalidTaskBackend,
    signals,
)
from relay_queue.exceptions import InvalidJob
from relay_queue.results import (
    Call,
    EnqueuedResults,
    enqueued_result,
    stored_result,
)
from relay_queue.task import RelayTask, resolve
from relay_queue.wakeup import ring_on_commit

OPTIONS: Final = ("backoff", "lease_seconds", "max_attempts", "timeout_seconds")
"""What ``TASKS[alias]["OPTIONS"]`` may set for tasks of the alias that do not say themselves."""


class RelayBackend(BaseTaskBackend):
    """Stores jobs in the queue's database; ``manage.py runworker`` runs them.

    An enqueue is one transaction, or part of the caller's: inside ``atomic()`` the job exists if
    and only if the caller's rows do. ``OPTIONS`` are defaults for the tasks of the alias:
    ``max_attempts``, ``backoff``, ``timeout_seconds``, ``lease_seconds``.
    """

    task_class = RelayTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        unknown = sorted(set(self.options) - set(OPTIONS))
        if unknown:
            raise InvalidTaskBackend(
                f"TASKS[{alias!r}]['OPTIONS'] has {', '.join(unknown)}; "
                f"Relay knows {', '.join(OPTIONS)}."
            )

    def validate_task(self, task: AnyTask) -> None:
        """Raise the framework's ``InvalidTask`` if the task or an option of it is not usable."""
        super().validate_task(task)
        if "." in task.func.__qualname__:
            raise InvalidTask(
                f"{task.module_path} is defined in a class, and workers look for tasks in modules. "
                "Move the function out of the class."
            )
        if task.func.__module__ == "__main__":
            raise InvalidTask(
                f"{task.name} is defined in the script that is running, where no worker would find "
                "it. Move it to a module of an app."
            )
        if isinstance(task, RelayTask):
            _require_exceptions(task)
            _require_wait_seconds(task)
            self._require_atomic_is_possible(task)
        if not isinstance(backoff := self._option(task, "backoff"), Backoff | None):
            raise InvalidTask(f"backoff of {task.module_path} is {backoff!r}; use a Backoff.")
        try:
            store.prepare(
                idempotency_key=getattr(task, "idempotency_key", None), **self._job_options(task)
            )
        except InvalidJob as error:
            raise InvalidTask(f"{task.module_path}: {error}") from error

    def enqueue(  # type: ignore[override]
        self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AnyResult:
        """Enqueue one call and return its result, or that of the job that has its key already.

        Raises `InvalidJob` with its children, `QueueFull` and `IdempotencyConflict`; nothing is
        written then.
        """
        key = getattr(task, "idempotency_key", None)
        job = store.call(self._agree(task), args, kwargs, key)
        wait_seconds = getattr(task, "wait_seconds", None)
        if wait_seconds is None:
            with store.transaction() as tx:
                enqueued = store.enqueue(tx, job)
        else:
            enqueued = store.enqueue_waiting(job, wait_seconds)
        if not enqueued.created:
            return self.get_result(str(enqueued.job_id))
        ring_on_commit(conf.get().database)
        result = enqueued_result((task, args, kwargs), self.alias, enqueued)
        signals.task_enqueued.send_robust(type(self), task_result=result)
        return result

    def enqueue_many(self, calls: Iterable[Call]) -> EnqueuedResults:
        """Enqueue many calls, ``(task, args, kwargs)`` each, in one transaction: all or none.

        Returns their results in order. Like Django's ``bulk_create`` it sends no signals, and it
        never waits for room. Raises like `enqueue`.
        """
        taken = list(calls)
        # A batch mostly has a few tasks and many calls of each.
        tasks = {id(task): task for task, _, _ in taken}
        agreed = {key: self._agree(task) for key, task in tasks.items()}
        jobs = [
            store.call(agreed[id(task)], args, kwargs, getattr(task, "idempotency_key", None))
            for task, args, kwargs in taken
        ]
        with store.transaction() as tx:
            enqueued = store.enqueue_many(tx, jobs)
        ring_on_commit(conf.get().database)
        return EnqueuedResults(self.alias, taken, enqueued)

    async def aenqueue_many(self, calls: Iterable[Call]) -> EnqueuedResults:
        """Enqueue many calls from a coroutine; see `enqueue_many`."""
        return await sync_to_async(self.enqueue_many, thread_sensitive=True)(calls)

    def get_result(self, result_id: str) -> AnyResult:
        """Read a job and its attempts. The id is the job's, as text.

        Raises ``TaskResultDoesNotExist`` if there is no such job (any more), and
        ``TaskResultMismatch`` if its task is not in the code.
        """
        return stored_result(result_id)

    def _agree(self, task: AnyTask) -> store.Terms:
        """Return the terms of a task that a worker will find. Raises `UnknownTask` otherwise."""
        if task.backend != self.alias:
            self.validate_task(task)
        resolve(task.module_path, self.alias)
        return store.terms(**self._job_options(task))

    def _job_options(self, task: AnyTask) -> dict[str, Any]:
        return {
            "task": task.module_path,
            "queue": task.queue_name,
            "backend": self.alias,
            "priority": task.priority,
            "run_after": task.run_after,
            "max_attempts": self._option(task, "max_attempts"),
            "lease_seconds": self._option(task, "lease_seconds"),
            "timeout_seconds": self._option(task, "timeout_seconds"),
            "backoff": self._option(task, "backoff"),
        }

    def _option(self, task: AnyTask, name: str) -> Any:
        """Return what the task says, else what the alias says, else None: the project's default."""
        own = getattr(task, name, None)
        return self.options.get(name) if own is None else own

    def _require_atomic_is_possible(self, task: RelayTask[..., Any]) -> None:
        if not task.atomic:
            return
        if iscoroutinefunction(task.func):
            raise InvalidTask(
                f"{task.module_path} is a coroutine function, and a transaction belongs to a "
                "thread. Make it a plain function, or leave atomic out."
            )
        settings = conf.get()
        timeout, limit = self._option(task, "timeout_seconds"), settings.atomic_max_seconds
        timeout = settings.timeout_seconds if timeout is None else timeout
        if timeout is None or timeout > limit:
            raise InvalidTask(
                f"{task.module_path} is atomic and holds the database's writer while it runs, so "
                f"its timeout_seconds must be at most {limit:g}; it is {timeout}. Set it lower, or "
                'raise RELAY["ATOMIC_MAX_SECONDS"].'
            )


def _require_exceptions(task: RelayTask[..., Any]) -> None:
    for name in ("retry_on", "fatal_on"):
        kinds: object = getattr(task, name)
        if not isinstance(kinds, tuple) or not all(
            isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds
        ):
            raise InvalidTask(
                f"{name} of {task.module_path} is {kinds!r}; use a tuple of exception classes."
            )


def _require_wait_seconds(task: RelayTask[..., Any]) -> None:
    wait, limit = task.wait_seconds, conf.get().max_defer_seconds
    if wait is not None and not (isinstance(wait, (int, float)) and 0 <= wait <= limit):
        raise InvalidTask(
            f"wait_seconds of {task.module_path} is {wait!r}; use seconds from 0 to {limit:g}."
        )
