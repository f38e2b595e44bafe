"""The front door: Django's task backend that stores jobs in the database.

Signals are sent robustly. An enqueue that has committed must not raise because a receiver did: the
caller would enqueue again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import iscoroutinefunction
from operator import attrgetter
from time import monotonic
from typing import Any, ClassVar, Final, NamedTuple

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core import checks
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from relay_queue import announce, conf, store, validation
from relay_queue.backoff import MAX_DELAY_SECONDS, Backoff
from relay_queue.compat import (
    AnyResult,
    AnyTask,
    BaseTaskBackend,
    InvalidTask,
    InvalidTaskBackend,
)
from relay_queue.exceptions import (
    ConfigurationError,
    InvalidJob,
    PayloadError,
    QueueFull,
    shown,
)
from relay_queue.payload import NO_ARGUMENTS
from relay_queue.results import EnqueuedResults, complete, new_result, note_enqueued, stored_result
from relay_queue.store.enqueue import WAIT_STEP_SECONDS
from relay_queue.task import (
    Call,
    RelayTask,
    normalized,
    require_callable_with,
    require_calls,
    require_exceptions,
    resolve,
)

OF_JOBS: Final = ("backoff", "lease_seconds", "max_attempts", "timeout_seconds")
"""The options that are stored with a job."""

OPTIONS: Final = (*OF_JOBS, "enqueue_on_commit", "max_payload_bytes")
"""What ``TASKS[alias]["OPTIONS"]`` may set; all but ``enqueue_on_commit`` are for the tasks of the
alias that do not say themselves."""

OF_CALLS: Final = frozenset({"idempotency_key", "run_after", "wait_seconds"})
"""The options that ``using`` mostly sets for one call. Tasks that differ in no other one are alike."""

MOST_REMEMBERED: Final = 1024
"""Kinds of tasks whose job options a backend remembers."""

MIN_PAYLOAD_BYTES: Final = len(NO_ARGUMENTS)

INSTALL: Final = 'Add "relay_queue" to INSTALLED_APPS and run manage.py migrate.'

_what_is_alike = attrgetter(*(f.name for f in fields(RelayTask) if f.name not in OF_CALLS))


class _TaskOptions(NamedTuple):
    """What the jobs of all tasks that are alike have in common, under some settings.

    ``validated``: such a task has passed `RelayBackend.validate_task` under these settings.
    """

    settings: conf.RelaySettings
    jobs: store.JobOptions
    max_payload_bytes: int | None
    validated: bool


@dataclass(slots=True)
class WaitingInsert:
    """The insert of jobs that waits for the commit of the caller's rows.

    `relay_queue.testing` looks for them: in a test the commit may never come.
    """

    insert: Callable[[], None]
    jobs: Sequence[store.NewJob]
    done: bool = False

    def __call__(self) -> None:
        """Insert the jobs. A commit that is pretended leaves this registered."""
        self.done = True
        self.insert()


class RelayBackend(BaseTaskBackend):
    """Stores jobs in the queue's database; ``manage.py runworker`` runs them.

    An enqueue is one transaction, or part of the caller's: inside ``atomic()`` the job exists if
    and only if the caller's rows do. ``OPTIONS`` are defaults for the tasks of the alias:
    ``max_attempts``, ``backoff``, ``timeout_seconds``, ``lease_seconds``, ``max_payload_bytes``.

    A queue in a database of its own cannot share a transaction with the caller's rows. With
    ``"enqueue_on_commit": True``, or the alias of the database that has the rows, an enqueue inside
    ``atomic()`` of that database is checked at once. The job is written right after the commit, as
    with ``transaction.on_commit``. Until then the result's ``id`` is empty and its ``enqueued_at``
    is None; after a rollback they stay so. A refusal that is known only when the job is written,
    such as `QueueFull`, is then raised out of the ``atomic()`` block, with the rows committed. A
    process that dies between the commit and the write loses the job.
    """

    task_class = RelayTask
    known_options: ClassVar[Collection[str]] = OPTIONS
    """What ``OPTIONS`` may have. A subclass adds its own; ``self.options`` has their values."""
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        _require_parameters(alias, params)
        super().__init__(alias, params)
        asked: object = self.options.get("enqueue_on_commit", False)
        # Another kind of value is told by `check`: the project's modules must load until then.
        self._rows_in: Any = DEFAULT_DB_ALIAS if asked is True else asked or None
        self._remembered: dict[Hashable, _TaskOptions] = {}

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check that the app is installed, and that some task could use each of ``OPTIONS``."""
        if not apps.is_installed("relay_queue"):
            message = f"TASKS[{self.alias!r}] uses Relay, which is not in INSTALLED_APPS."
            return [checks.Error(message, hint=INSTALL, id="relay_queue.E007")]
        try:
            self._require_options()
        except ConfigurationError:
            return []  # relay_queue.E001 says so
        except InvalidJob as error:
            hint = "Correct it, or leave it out: every option has a default."
            return [checks.Error(f"{error}.", hint=hint, id="relay_queue.E006")]
        return []

    def _require_options(self) -> None:
        """Raise `InvalidJob` if ``OPTIONS`` have a name or a value that no task could use."""
        given = {name: self.options[name] for name in OF_JOBS if name in self.options}
        try:
            self._require_known_options()
            queue = next(iter(conf.get().queues or ["default"]))
            store.job_options(task=self.alias, backend=self.alias, queue=queue, **given)
            self._require_payload_limit(self.options.get("max_payload_bytes"))
        except InvalidJob as error:
            raise InvalidJob(f"TASKS[{self.alias!r}]['OPTIONS'] is not usable: {error}") from error

    def _require_known_options(self) -> None:
        unknown = sorted(map(str, set(self.options) - set(self.known_options)))
        if unknown:
            raise InvalidJob(
                f"it has {', '.join(unknown)}; {type(self).__name__} knows "
                f"{', '.join(self.known_options)}"
            )
        rows = self._rows_in
        if rows is not None and (not isinstance(rows, str) or rows not in connections.settings):
            raise InvalidJob(
                f"enqueue_on_commit is {shown(rows)}; use True, which means {DEFAULT_DB_ALIAS!r}, "
                "or an alias of DATABASES"
            )

    def validate_task(self, task: AnyTask) -> None:
        """Raise the framework's ``InvalidTask`` if the task or an option of it is not usable.

        ``using`` makes a task, which the framework validates. Of a task like one that has passed,
        only the options of the call are looked at. While ``RELAY`` or ``OPTIONS`` are unusable, the
        limits are unknown: ``check`` must get to say so (E001, E006), though the URLconf imports
        tasks, and an enqueue raises.
        """
        try:
            known = self._recall(task)
            if known is None:
                self._require_options()
        except (ConfigurationError, InvalidJob):
            super().validate_task(task)
            return
        if known is not None and known.validated:
            with suppress(InvalidTask):  # whose cause the framework has words for, perhaps
                _require_usable_call(task)
                return
        self._validate_all(task)
        self._remember(task, validated=True)

    def _validate_all(self, task: AnyTask) -> None:
        self._require_admitted(task.queue_name)
        try:
            super().validate_task(task)
        except (AttributeError, TypeError, ValueError):  # it compares before it asks for the type
            self._require_job_options(task)
            raise
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
            require_exceptions(task)
            self._require_atomic_is_possible(task)
        self._require_job_options(task)

    def enqueue(  # type: ignore[override]
        self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AnyResult:
        """Enqueue one call and return its result, or that of the job that has its key already.

        Raises `InvalidJob` with its children, `QueueFull` and `IdempotencyConflict`; nothing is
        written then.
        """
        job = self.prepare(task, args, kwargs)
        result = new_result((task, args, kwargs), self.alias)
        self.when_committed(partial(self._insert, job, result), (job,))
        return result

    def prepare(
        self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> store.NewJob:
        """Return the job that an enqueue of this call would insert. Raises like `enqueue`."""
        return self._job(self._options_of(task), (task, args, kwargs))

    async def aenqueue(  # type: ignore[override]
        self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AnyResult:
        """Enqueue from a coroutine; see `enqueue`. Waiting for room keeps no thread busy."""
        wait_seconds = getattr(task, "wait_seconds", None)
        call: Any = {"args": args, "kwargs": kwargs}
        if wait_seconds is None or self._rows_in is not None:
            return await super().aenqueue(task, **call)
        at_once = replace(task, wait_seconds=None)  # type: ignore[call-arg]
        deadline, pause = monotonic() + wait_seconds, WAIT_STEP_SECONDS
        while True:
            try:
                result = await super().aenqueue(at_once, **call)
            except QueueFull:
                left = deadline - monotonic()
                if left <= 0 or await sync_to_async(_is_inside_atomic)():
                    raise
            else:
                complete(result, task=task)
                return result
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 2, 1.0)

    def enqueue_many(self, calls: Iterable[Call]) -> EnqueuedResults:
        """Enqueue many calls, ``(task, args, kwargs)`` each, in one transaction: all or none.

        Returns their results in order. Like Django's ``bulk_create`` it sends no signals, and it
        never waits for room. Raises like `enqueue`.
        """
        taken = require_calls(calls)
        # A batch mostly has a few tasks and many calls of each.
        tasks = {id(task): task for task, _, _ in taken}
        options = {key: self._options_of(task) for key, task in tasks.items()}
        jobs = [self._job(options[id(call[0])], call) for call in taken]
        results = EnqueuedResults(self.alias, taken)
        self.when_committed(partial(self._insert_many, jobs, results), jobs)
        return results

    async def aenqueue_many(self, calls: Iterable[Call]) -> EnqueuedResults:
        """Enqueue many calls from a coroutine; see `enqueue_many`."""
        return await sync_to_async(self.enqueue_many, thread_sensitive=True)(calls)

    def get_result(self, result_id: str) -> AnyResult:
        """Read a job and its attempts. The id is the job's, as text.

        Raises ``TaskResultDoesNotExist`` if there is no such job (any more), and
        ``TaskResultMismatch`` if its task is not in the code.
        """
        _require_installed(self.alias)
        return stored_result(result_id)

    def after_insert(self, results: Sequence[AnyResult]) -> None:
        """Do nothing more: the jobs are in the table. `relay_queue.testing` may run them here."""

    def when_committed(self, insert: Callable[[], None], jobs: Sequence[store.NewJob]) -> None:
        """Insert now; or, if the alias says so, when the caller's rows are committed."""
        alias = self._rows_in
        if alias is None or alias == conf.get().database:
            insert()  # the caller's transaction, if there is one, is that of the job
        else:
            # At once if there is no transaction.
            transaction.on_commit(WaitingInsert(insert, jobs), using=alias)

    def _insert(self, job: store.NewJob, result: AnyResult) -> None:
        wait_seconds = getattr(result.task, "wait_seconds", None)
        if wait_seconds is None:
            enqueued = store.in_transaction(lambda tx: store.enqueue(tx, job))
        else:
            enqueued = store.enqueue_waiting(job, wait_seconds)
        note_enqueued(result, enqueued)
        if enqueued.created:
            announce.enqueued(type(self), result)
            self.after_insert([result])

    def _insert_many(self, jobs: Sequence[store.NewJob], results: EnqueuedResults) -> None:
        results.note_enqueued(store.in_transaction(lambda tx: store.enqueue_many(tx, jobs)))
        self.after_insert(results)

    @staticmethod
    def _job(options: _TaskOptions, call: Call) -> store.NewJob:
        """Return the job of a call.

        Raises `PayloadError` if its arguments do not fit the function, or cannot be stored.
        """
        task, args, kwargs = call
        require_callable_with(task, args, kwargs)
        key, limit = getattr(task, "idempotency_key", None), options.max_payload_bytes
        try:
            job = store.build_job(options.jobs, args, kwargs, key)
        except PayloadError as refusal:
            # The framework also takes text as bytes, and other kinds of sequences and mappings.
            job = store.build_job(options.jobs, *normalized(args, kwargs, refusal), key)
        if limit is not None and len(job.payload) > limit:
            raise PayloadError(
                f"the arguments of {task.module_path} take {len(job.payload):,} bytes of JSON, and "
                f"its max_payload_bytes is {limit:,}. Store the data and pass a reference."
            )
        return job

    def _options_of(self, task: AnyTask) -> _TaskOptions:
        """Return the options of a task that a worker will find. Raises `UnknownTask` otherwise."""
        _require_installed(self.alias)
        known = self._recall(task)
        if known is None:
            self._require_options()
            if not self._owns(task):
                self.validate_task(task)  # else its own alias did, when the task was made
        resolve(task.module_path, self.alias)
        if known is None:
            known = self._remember(task, validated=False)
        if task.run_after is None:
            return known
        due = validation.require_run_after(task.run_after, known.settings.max_defer_seconds)
        return known._replace(jobs=replace(known.jobs, run_after=due))

    def _owns(self, task: AnyTask) -> bool:
        return task.backend == self.alias and (not self.queues or task.queue_name in self.queues)

    def _recall(self, task: AnyTask) -> _TaskOptions | None:
        """Return what is remembered of tasks like this one, under the present settings."""
        try:
            found = self._remembered.get(_kind(task))
        except (AttributeError, TypeError):  # not a Relay task, or one with an option like a list
            return None
        return found if found is not None and found.settings is conf.get() else None

    def _remember(self, task: AnyTask, *, validated: bool) -> _TaskOptions:
        """Check the options that tasks like this one share, and remember them."""
        jobs = store.job_options(**self._job_options(task))
        limit = self._option(task, "max_payload_bytes")
        options = _TaskOptions(conf.get(), jobs, limit, validated)
        with suppress(AttributeError, TypeError):
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[_kind(task)] = options
        return options

    def _job_options(self, task: AnyTask) -> dict[str, Any]:
        return {
            "task": task.module_path,
            "queue": task.queue_name,
            "backend": self.alias,
            "priority": task.priority,
            **{name: self._option(task, name) for name in OF_JOBS},
        }

    def _option(self, task: AnyTask, name: str) -> Any:
        """Return what the task says, else what the alias says, else None: the project's default."""
        own = getattr(task, name, None)
        return self.options.get(name) if own is None else own

    @staticmethod
    def _require_payload_limit(limit: object) -> None:
        highest = conf.get().max_payload_bytes
        if limit is None:
            return
        whole = isinstance(limit, int) and not isinstance(limit, bool)
        if not whole or not MIN_PAYLOAD_BYTES <= limit <= highest:  # type: ignore[operator]
            raise InvalidJob(
                f"max_payload_bytes is {shown(limit)}; use a whole number from {MIN_PAYLOAD_BYTES} to "
                f'{highest:,}, which is RELAY["MAX_PAYLOAD_BYTES"]'
            )

    def _require_admitted(self, name: object) -> None:
        if self.queues and isinstance(name, str) and name not in self.queues:
            raise InvalidTask(
                f"Queue {name!r} is not valid for backend. The QUEUES of {self.alias!r} are "
                f"{', '.join(sorted(map(repr, self.queues)))}. Add it there, or set QUEUES to [], "
                "which admits every queue."
            )

    def _require_job_options(self, task: AnyTask) -> None:
        if not isinstance(backoff := self._option(task, "backoff"), Backoff | None):
            raise InvalidTask(f"backoff of {task.module_path} is {backoff!r}; use a Backoff.")
        _require_usable_call(task)
        try:
            self._require_payload_limit(self._option(task, "max_payload_bytes"))
            store.job_options(**self._job_options(task))
        except InvalidJob as error:
            raise InvalidTask(f"{task.module_path}: {error}") from error

    def _require_atomic_is_possible(self, task: RelayTask[..., Any]) -> None:
        for name in ("atomic", "takes_context"):
            if not isinstance(getattr(task, name), bool):  # "no" would be taken for yes
                raise InvalidTask(
                    f"{name} of {task.module_path} is {shown(getattr(task, name))}; use True or False."
                )
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
                f"its timeout_seconds must be at most {limit:g}; it is {shown(timeout)}. Set it lower, or "
                'raise RELAY["ATOMIC_MAX_SECONDS"].'
            )


def _kind(task: AnyTask) -> Hashable:
    """Return what tasks that are alike have in common. Raises ``AttributeError`` for other tasks.

    With the types of the options: True equals 1, and is no number of attempts.
    """
    values = _what_is_alike(task)
    return (*values, *map(type, values))


def _require_usable_call(task: AnyTask) -> None:
    """Raise ``InvalidTask`` unless the options of one call are usable."""
    try:
        if task.run_after is not None:
            validation.require_run_after(task.run_after, conf.get().max_defer_seconds)
        if isinstance(task, RelayTask):
            validation.require_idempotency_key(task.idempotency_key)
            if (wait := task.wait_seconds) is not None:
                validation.require_seconds("wait_seconds", wait, 0.0, MAX_DELAY_SECONDS)
    except InvalidJob as error:
        raise InvalidTask(f"{task.module_path}: {error}") from error


def _is_inside_atomic() -> bool:
    return connections[conf.get().database].in_atomic_block


def _require_installed(alias: str) -> None:
    """Raise `ConfigurationError` if the project uses the backend without the app and its tables."""
    # Not is_installed, which looks at every app: this is asked for each enqueue.
    if "relay_queue" not in apps.app_configs:
        raise ConfigurationError(
            f"TASKS[{alias!r}] uses Relay, which is not in INSTALLED_APPS. {INSTALL}"
        )


def _require_parameters(alias: str, params: Mapping[str, Any]) -> None:
    options: object = params.get("OPTIONS", {})
    if not isinstance(options, Mapping):
        raise InvalidTaskBackend(f"TASKS[{alias!r}]['OPTIONS'] is {shown(options)}; use a dict.")
    queues: object = params.get("QUEUES", [])
    # Text is a collection, too: of queues with names of one letter.
    listed = isinstance(queues, Collection) and not isinstance(queues, str)
    if not listed or not all(isinstance(name, str) for name in queues):  # type: ignore[attr-defined]
        raise InvalidTaskBackend(
            f"TASKS[{alias!r}]['QUEUES'] is {shown(queues)}; use a list of names. [] admits every "
            "queue."
        )
