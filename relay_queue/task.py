"""Tasks with what jobs need, and the way back from a stored path to a task.

`task` is Django's decorator with Relay's options. It works on every supported Django, and a task
made with it also runs on backends other than Relay's, which ignore the options. An idempotency key
is not ignored but refused there: the caller relies on it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import lru_cache
from inspect import Parameter, Signature, signature
from types import ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from django.apps import apps
from django.conf import ENVIRONMENT_VARIABLE
from django.core.signals import setting_changed
from django.utils.module_loading import import_string, module_has_submodule

from relay_queue import conf, payload
from relay_queue.backoff import Backoff
from relay_queue.compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_PRIORITY,
    DEFAULT_TASK_QUEUE_NAME,
    AnyTask,
    BaseTaskBackend,
    InvalidTask,
    InvalidTaskBackend,
    Task,
    TaskResult,
    normalize_json,
    task_backends,
)
from relay_queue.context import RelayContext
from relay_queue.exceptions import PayloadError, UnknownTask, shown
from relay_queue.logs import get_logger
from relay_queue.store.enqueue import tasks_are_named_by

# Where Django logs what looks like an attack.
security_logger = get_logger("django.security.UnknownTask")

_VARIADIC: Final = frozenset({Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD})

P = ParamSpec("P")
R = TypeVar("R")

ExceptionTypes = tuple[type[BaseException], ...]

Call = tuple[AnyTask, Sequence[Any], Mapping[str, Any]]
"""A task with the positional and the keyword arguments of one call; see `RelayTask.bind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTask(Task, Generic[P, R]):  # type: ignore[type-arg]
    """A task with the options of its jobs. None means the default of the alias, or of the project.

    Made by the decorators. Raises the framework's ``InvalidTask`` if an option is out of bounds.
    """

    # The framework's own fields again, since in Django 6.0 they have no defaults.
    priority: int = DEFAULT_TASK_PRIORITY
    backend: str = DEFAULT_TASK_BACKEND_ALIAS
    queue_name: str = DEFAULT_TASK_QUEUE_NAME
    run_after: datetime | None = None
    max_attempts: int | None = None
    """Charged attempts before the job goes to the dead letters."""
    backoff: Backoff | None = None
    """How long a failed job waits before its next attempt."""
    retry_on: ExceptionTypes = ()
    """If given, only these exceptions are tried again; any other is fatal."""
    fatal_on: ExceptionTypes = ()
    """Exceptions that send the job to the dead letters at once."""
    timeout_seconds: float | None = None
    """How long an attempt may run."""
    lease_seconds: float | None = None
    """Length of the lease, which the worker renews while the function runs."""
    atomic: bool = False
    """Whether the function and its ack commit in one transaction of the queue's database."""
    idempotency_key: str | None = None
    """Names this call within its queue: enqueueing it again returns the job that exists."""
    wait_seconds: float | None = None
    """How long an enqueue waits for room in a full queue. None refuses at once."""
    max_payload_bytes: int | None = None
    """The most that the arguments may take, in bytes of JSON text; at most the project's limit."""

    def __post_init__(self) -> None:
        # Not super(): a class with slots is made twice, and this cell knows the first one.
        Task.__post_init__(self)
        if self.idempotency_key is not None:
            _require_keys(self)

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        idempotency_key: str | None = None,
        wait_seconds: float | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | None = None,
        timeout_seconds: float | None = None,
        lease_seconds: float | None = None,
    ) -> RelayTask[P, R]:
        """Return a copy with some options changed; None leaves an option as it is."""
        changes = {
            name: value for name, value in locals().items() if name != "self" and value is not None
        }
        return replace(self, **changes)

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Return a call that is not enqueued yet, for `relay_queue.enqueue_many`.

        ``enqueue_many([send.bind(1), send.bind(2)])`` has its arguments type-checked.
        """
        return self, args, kwargs

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "func"}
        return _rebuild, (self.module_path, options, type(self))

    if TYPE_CHECKING:  # what the framework does, typed by the function

        def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskResult[P, R]:
            """Enqueue a call of the function; inside ``atomic()`` it commits with the caller."""

        async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskResult[P, R]:
            """Enqueue from a coroutine; see `enqueue`."""

        def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Call the function here and now, without a job."""

        async def acall(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Call the function from a coroutine, without a job."""

        def get_result(self, result_id: str) -> TaskResult[P, R]:
            """Read the result of a job of this task."""

        async def aget_result(self, result_id: str) -> TaskResult[P, R]:
            """Read from a coroutine; see `get_result`."""


class _Options(TypedDict, total=False):
    priority: int
    queue_name: str
    backend: str
    max_attempts: int | None
    backoff: Backoff | None
    retry_on: ExceptionTypes
    fatal_on: ExceptionTypes
    timeout_seconds: float | None
    lease_seconds: float | None
    atomic: bool
    max_payload_bytes: int | None


class _Decorator(Protocol):
    """What ``task(…)`` returns. A job of a coroutine function returns what that is awaited for."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> RelayTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> RelayTask[P, R]: ...


class _ContextDecorator(Protocol):
    """The same of a function whose first argument is the context."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[RelayContext, P], Coroutine[Any, Any, R]], /
    ) -> RelayTask[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[RelayContext, P], R], /
    ) -> RelayTask[P, R]: ...


@overload
def task(function: Callable[P, Coroutine[Any, Any, R]], /) -> RelayTask[P, R]: ...
@overload
def task(function: Callable[P, R], /) -> RelayTask[P, R]: ...
@overload
def task(*, takes_context: Literal[True], **options: Unpack[_Options]) -> _ContextDecorator: ...
@overload
def task(*, takes_context: Literal[False] = ..., **options: Unpack[_Options]) -> _Decorator: ...
def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    priority: int = DEFAULT_TASK_PRIORITY,
    queue_name: str = DEFAULT_TASK_QUEUE_NAME,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: bool = False,
    max_attempts: int | None = None,
    backoff: Backoff | None = None,
    retry_on: ExceptionTypes = (),
    fatal_on: ExceptionTypes = (),
    timeout_seconds: float | None = None,
    lease_seconds: float | None = None,
    atomic: bool = False,
    max_payload_bytes: int | None = None,
) -> Any:
    """Make a module-level function a task: ``@task``, or ``@task(max_attempts=5, …)``.

    The options are the fields of `RelayTask`. With ``takes_context`` the function's first argument
    is called ``context`` and is a `relay_queue.RelayContext`. Raises the framework's
    ``InvalidTask`` if the function or an option is not usable.
    """
    options = {name: value for name, value in locals().items() if name != "function"}

    def make(func: Callable[..., Any]) -> RelayTask[..., Any]:
        return RelayTask(func=func, **options)

    return make if function is None else make(function)


@lru_cache(maxsize=4096)
def resolve(path: str, backend: str) -> AnyTask:
    """Return the task that a stored path names, if a job of alias ``backend`` may run it.

    A user who can write the table can write any path, so nothing is called and little is imported.
    A path runs only if it leads to a registered `Task`, under its own name or another: a task that
    was moved or renamed is still found where its old module has it. Registered is a task to which
    its own path leads. The alias of the job must be backed by Relay; that of the task need not be,
    since ``using(backend=…)`` sends a call elsewhere. A module is imported only if it is part of an
    installed app or of the package of the settings. Any other module must have been imported by the
    project itself. Raises `UnknownTask` with the reason, or any error that the module raises while
    it is imported.
    """
    _require_relay(path, backend)
    found = _task_at(path)
    if found.module_path != path and _task_at(found.module_path).func is not found.func:
        raise UnknownTask(
            f"{path!r} is a task made of {found.module_path!r}, where another one is. Was it "
            "defined a second time?"
        )
    return found


def _leads_to_same(stored: str, path: str, backend: str) -> bool:
    """Say whether a stored path leads to the task of another path, as that of a moved one does."""
    try:
        return resolve(stored, backend).func is resolve(path, backend).func
    except Exception:  # noqa: BLE001 - an import runs code of the project's
        return False


tasks_are_named_by(_leads_to_same)


def _task_at(path: str) -> AnyTask:
    module_name, _, name = path.rpartition(".")
    # Not getattr: a module's __getattr__ is code, and would run with the stored name.
    found = vars(_module(path, module_name)).get(name)
    if found is None:
        raise UnknownTask(
            f"{path!r} is nothing, not a task. Was it renamed, moved or removed? Keep the old name "
            "in the old module for as long as jobs have it: old = new."
        )
    # Not isinstance: a lazy object runs its code when it is asked for its class.
    if not issubclass(type(found), Task):
        raise _suspicion(f"{path!r} is a {type(found).__name__}, not a task.")
    task: AnyTask = found
    return task


def as_enqueued(path: str, backend: str, queue: str, priority: int, **more: Any) -> AnyTask:
    """Return the task of a job with the alias, the queue and the priority of that job.

    ``more`` are further fields of the task. Raises like `resolve`.
    """
    found = resolve(path, backend)
    asked: dict[str, Any] = {"backend": backend, "queue_name": queue, "priority": priority}
    # A task of another backend's decorator knows no keys.
    asked |= {name: value for name, value in more.items() if hasattr(found, name)}
    if all(getattr(found, name) == value for name, value in asked.items()):
        return found
    try:
        return replace(found, **asked)
    except InvalidTask:
        return found  # the settings have changed since; what is in the table still runs


class _Rule(NamedTuple):
    """What a function takes, after so many positional arguments: ``needed[n]``, ``allowed[n]``.

    Calls that these sets admit are right. The others are left to ``signature``, which has the last
    word: it is ten times slower, and knows ``*args`` and ``**kwargs``.
    """

    needed: tuple[frozenset[str], ...]
    allowed: tuple[frozenset[str], ...]
    signature: Signature


def normalized(
    args: Sequence[Any], kwargs: Mapping[str, Any], refusal: PayloadError
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments as the framework stores them; raises ``refusal`` if it refuses them too."""
    settings, given = conf.get(), [list(args), dict(kwargs)]
    limits = {"max_items": settings.max_payload_bytes, "max_depth": settings.max_payload_depth}
    try:
        plain: Any = normalize_json(given) if payload.is_bounded(given, **limits) else None
    except (TypeError, ValueError) as error:
        if str(error).startswith("Unsupported "):  # the framework's words first, where it has some
            raise PayloadError(f"{error}. {refusal}", refusal.path) from refusal
        plain = None
    except (OverflowError, RecursionError):
        plain = None
    if plain is None:
        raise refusal
    return plain[0], plain[1]


def require_callable_with(task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `PayloadError` if the function of a task does not take these arguments."""
    rule = _rule(task.func, task.takes_context)
    n = len(args)
    if n < len(rule.needed):
        needed = rule.needed[n]
        if (not kwargs and not needed) or needed <= kwargs.keys() <= rule.allowed[n]:
            return
    try:
        rule.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise PayloadError(
            f"{task.module_path}{rule.signature} cannot be called so: {error}. Nothing was enqueued."
        ) from error


@lru_cache(maxsize=4096)
def _rule(function: Callable[..., Any], takes_context: bool) -> _Rule:
    # Not the signature of a function that is wrapped: the wrapper may add arguments of its own.
    found = signature(function, follow_wrapped=False)
    parameters = list(found.parameters.values())[1 if takes_context else 0 :]
    named = [p for p in parameters if p.kind not in _VARIADIC]
    by_place = [p for p in named if p.kind is not Parameter.KEYWORD_ONLY]
    needed, allowed = [], []
    for n in range(len(by_place) + 1):
        left = [p for p in named if p not in by_place[:n]]
        needed.append(frozenset(p.name for p in left if p.default is Parameter.empty))
        allowed.append(frozenset(p.name for p in left if p.kind is not Parameter.POSITIONAL_ONLY))
    plain = [p.replace(annotation=Parameter.empty) for p in parameters]
    return _Rule(tuple(needed), tuple(allowed), Signature(plain))


def require_calls(calls: Iterable[Call]) -> list[Call]:
    """Return calls as a list. Raises ``TypeError`` if one of them is none, or if it is one alone."""
    if isinstance(calls, Task):
        raise TypeError(
            f"{calls.module_path} is a task; give a list of calls: task.bind(…) makes one"
        )
    taken = list(calls)
    for place, call in enumerate(taken):
        if type(call) is not tuple or len(call) != 3 or not isinstance(call[0], Task):
            raise TypeError(
                f"number {place} of the calls is {shown(call)}, of type {type(call).__name__}; make "
                "each with task.bind(…), which takes the arguments"
            )
    return taken


def _require_relay(path: str, alias: str) -> None:
    try:
        backend: BaseTaskBackend = task_backends[alias]
    except InvalidTaskBackend as error:
        raise UnknownTask(f"{path!r} belongs to the alias {alias!r}, but: {error}") from error
    if not issubclass(backend.task_class, RelayTask):
        raise UnknownTask(f"{path!r} belongs to the alias {alias!r}, which Relay does not back.")


def _require_keys(task: RelayTask[..., Any]) -> None:
    """Raise ``InvalidTask`` if the backend of a task with an idempotency key would ignore the key."""
    backend = task.get_backend()
    if not issubclass(backend.task_class, RelayTask):
        raise InvalidTask(
            f"{task.module_path} has the idempotency_key {shown(task.idempotency_key)}, and "
            f"TASKS[{task.backend!r}] is a {type(backend).__name__}, which would run the call again. "
            'Leave the key out, or send the call to Relay with using(backend="…").'
        )


def _module(path: str, name: str) -> ModuleType:
    known = name in sys.modules
    if not known and not any(f"{name}.".startswith(f"{package}.") for package in task_packages()):
        raise _suspicion(
            f"{path!r} is in no installed app and was not imported by the project. "
            "Add its app to INSTALLED_APPS, or import it in the ready() of an app."
        )
    try:
        # Also for a known module: another slot may be in the middle of importing it, and only
        # import_module waits until its names are there.
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise  # the module is there; something that it imports is not
        raise UnknownTask(f"{path!r} names a module that is not there.") from missing


def _suspicion(reason: str) -> UnknownTask:
    """Return the error for a path that no enqueue of the project would have stored, and log it."""
    with suppress(Exception):  # a log handler may raise, and must not pass for the task's module
        security_logger.warning("A path was refused: %s", reason)
    return UnknownTask(reason)


def task_packages() -> set[str]:
    """Return the packages whose modules may be imported because a job names them."""
    found = {config.name for config in apps.get_app_configs()}
    project = os.environ.get(ENVIRONMENT_VARIABLE, "").partition(".")[0]
    return found | {project} if project else found


def import_task_modules() -> list[str]:
    """Import the module ``tasks`` of each of the project's packages; return why some cannot be."""
    faults = []
    for package in sorted(task_packages()):
        try:
            if module_has_submodule(importlib.import_module(package), "tasks"):
                importlib.import_module(f"{package}.tasks")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an import runs code of the project's
            faults.append(f"{package}.tasks cannot be imported: {error!r}")
    return faults


def _rebuild(
    path: str, options: dict[str, Any], kind: type[RelayTask[..., Any]] = RelayTask
) -> RelayTask[..., Any]:
    """Make a pickled task again; the function is the one that its path leads to now.

    Raises ``ValueError`` if that is no task, as the framework does.
    """
    try:
        found = import_string(path)
    except ImportError as error:
        raise ValueError(f"{path!r} leads nowhere, so it is not a task any more.") from error
    if not isinstance(found, Task):
        raise ValueError(f"{path!r} is of type {type(found).__name__}, not a task.")
    return kind(func=found.func, **options)


def _forget(*, setting: str, **_: Any) -> None:
    """Drop what was resolved when a test changes the aliases."""
    if setting in {"TASKS", "INSTALLED_APPS"}:
        resolve.cache_clear()


setting_changed.connect(_forget, dispatch_uid="relay_queue.task")


def require_exceptions(task: RelayTask[..., Any]) -> None:
    """Raise ``InvalidTask`` unless ``retry_on`` and ``fatal_on`` are tuples of exception classes."""
    for name in ("retry_on", "fatal_on"):
        kinds: object = getattr(task, name)
        if not isinstance(kinds, tuple) or not all(
            isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds
        ):
            raise InvalidTask(
                f"{name} of {task.module_path} is {kinds!r}; use a tuple of exception classes."
            )
