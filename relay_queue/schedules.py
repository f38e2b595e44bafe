"""Schedules: calls of tasks that are enqueued again and again, by any worker, once for each slot.

Code declares them with `schedule`, or with ``RELAY["SCHEDULES"]`` for tasks of other packages. ``migrate``
writes what is declared to the table; from then on the table is what runs. A pause outlives deploys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any, Final, Literal, TypeVar

from django.conf import ENVIRONMENT_VARIABLE

from relay_queue import clock, conf, store, validation
from relay_queue.backend import RelayBackend
from relay_queue.compat import AnyTask, Task, task_backends
from relay_queue.exceptions import InvalidJob, InvalidSchedule, shown
from relay_queue.query import runs
from relay_queue.states import Missed, Overlap
from relay_queue.store import Declared, Synced
from relay_queue.store.schedules import next_slot
from relay_queue.task import as_enqueued, import_task_modules, require_callable_with
from relay_queue.timing import Cron, Every, cron, every

__all__ = ["cron", "every", "next_runs", "pause", "resume", "run", "schedule", "sync"]

AnyTaskT = TypeVar("AnyTaskT", bound=AnyTask)

MAX_NAME_CHARS: Final = 100
SLOTS_COMPARED: Final = 100
"""Slots whose gaps the jitter must fit into."""

MAX_SECONDS: Final = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class _Declaration:
    """A schedule as it is written in the code."""

    name: str
    task: AnyTask
    timing: Cron | Every
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    missed: str = Missed.ONCE
    missed_window_seconds: float = 86_400.0
    overlap: str = Overlap.SKIP
    jitter_seconds: float = 0.0
    start_at: datetime | None = None
    end_at: datetime | None = None
    queue_name: str | None = None
    priority: int | None = None

    def require_sense(self) -> None:
        """Raise `InvalidSchedule` if the parts make no sense, each or together."""
        _require_name(self.name)
        if not issubclass(type(self.task), Task):
            raise InvalidSchedule(
                f"schedule {self.name!r} is of {shown(self.task)}, which is no task"
            )
        if not isinstance(self.timing, Cron | Every):
            raise InvalidSchedule(f"schedule {self.name!r} has no timing; use cron(…) or every(…)")
        for name, kind in (("missed", Missed), ("overlap", Overlap)):
            if getattr(self, name) not in kind.values:
                known = ", ".join(map(repr, kind.values))
                raise InvalidSchedule(
                    f"{name} of schedule {self.name!r} is {shown(getattr(self, name))}; use {known}"
                )
        if self.missed == Missed.ALL and self.overlap != Overlap.ALLOW:
            raise InvalidSchedule(
                f'schedule {self.name!r} has missed="all" and overlap={str(self.overlap)!r}: every '
                'slot after the first would find its forerunner unfinished. Use overlap="allow"'
            )
        self._require_numbers()

    def _require_numbers(self) -> None:
        try:
            for name in ("missed_window_seconds", "jitter_seconds"):
                validation.require_seconds(name, getattr(self, name), 0.0, MAX_SECONDS)
            for name in ("start_at", "end_at"):
                if getattr(self, name) is not None:
                    validation.require_aware(name, getattr(self, name))
            require_callable_with(self.task, self.args, self.kwargs)
        except InvalidJob as error:
            raise InvalidSchedule(f"schedule {self.name!r}: {error}") from error
        if self.jitter_seconds and self.jitter_seconds >= (gap := self._shortest_gap()) / 2:
            raise InvalidSchedule(
                f"jitter_seconds of schedule {self.name!r} is {self.jitter_seconds:g}, and its slots are "
                f"{gap:g} seconds apart: they would change places. Use less than half of that"
            )

    def _shortest_gap(self) -> float:
        slots: list[datetime] = []
        slot = self.timing.after(clock.now())
        while slot is not None and len(slots) < SLOTS_COMPARED:
            slots.append(slot)
            slot = self.timing.after(slot)
        return min(((b - a).total_seconds() for a, b in pairwise(slots)), default=MAX_SECONDS)

    def columns(self) -> dict[str, Any]:
        """Return the columns of the row. Raises `InvalidSchedule` if no job could be made of it."""
        return {
            **self._terms(),
            **self.timing.columns(),
            "start_at": self.start_at,
            "end_at": self.end_at,
            "jitter_seconds": float(self.jitter_seconds),
            "missed": str(self.missed),
            "missed_window_seconds": float(self.missed_window_seconds),
            "overlap": str(self.overlap),
        }

    def _terms(self) -> dict[str, Any]:
        task, backend = self.task, task_backends[self.task.backend]
        if not isinstance(backend, RelayBackend):
            raise InvalidSchedule(
                f"schedule {self.name!r}: the alias {task.backend!r} of its task is not backed by Relay"
            )
        queue = self.queue_name or task.queue_name
        priority = task.priority if self.priority is None else self.priority
        try:
            called = as_enqueued(task.module_path, task.backend, queue, priority)
            job = backend.prepare(called, self.args, self.kwargs)
        except InvalidJob as error:
            raise InvalidSchedule(f"schedule {self.name!r}: {error}") from error
        options = job.options
        return {
            "queue": queue,
            "backend": options.backend,
            "task": options.task,
            "payload": job.payload,
            "priority": priority,
            "max_attempts": options.max_attempts,
            "lease_seconds": float(options.lease_seconds),
            "timeout_seconds": options.timeout_seconds,
            "backoff_base_seconds": float(options.backoff.base_seconds),
            "backoff_max_seconds": float(options.backoff.max_seconds),
            "backoff_jitter": options.backoff.jitter,
        }


_declared: dict[str, _Declaration] = {}


def schedule(
    name: str,
    timing: Cron | Every,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    missed: Literal["once", "skip", "all"] = "once",
    missed_window_seconds: float = 86_400.0,
    overlap: Literal["skip", "allow", "cancel"] = "skip",
    jitter_seconds: float = 0.0,
    start_at: datetime | None = None,
    end_at: datetime | None = None,
    queue_name: str | None = None,
    priority: int | None = None,
) -> Callable[[AnyTaskT], AnyTaskT]:
    """Declare that a task is enqueued at each slot of a timing; stands above ``@task``.

    ``missed`` says which slots run that came while no worker was there and are not older than
    ``missed_window_seconds``; ``overlap`` what happens while the job of the slot before is unfinished. A
    job is due up to ``jitter_seconds`` after its slot, the same for every worker. The task is returned
    as it was, and may have several schedules. Raises `InvalidSchedule`.
    """
    options = {key: value for key, value in locals().items() if key not in {"name", "timing"}}
    options["kwargs"] = {} if kwargs is None else kwargs

    def declare(task: AnyTaskT) -> AnyTaskT:
        _declare(_Declaration(name, task, timing, **options))
        return task

    return declare


def _declare(declaration: _Declaration) -> None:
    declaration.require_sense()
    known = _declared.get(declaration.name)
    # A module that is loaded again, as a reloader does, declares the same once more.
    if known is not None and known.task.module_path != declaration.task.module_path:
        raise InvalidSchedule(
            f"the schedule {declaration.name!r} is declared for {known.task.module_path} and for "
            f"{declaration.task.module_path}; use two names"
        )
    _declared[declaration.name] = declaration


def sync() -> Synced:
    """Make the schedules in the table what the code declares; ``migrate`` does so by itself.

    Returns the names that were added, changed and retired. Raises `InvalidSchedule`, and changes nothing,
    if a declaration makes no sense or a module of tasks cannot be imported: its schedules would retire.
    """
    faults = import_task_modules()
    if faults:
        raise InvalidSchedule(
            f"{'; '.join(faults)}. Its schedules are not known, so none is changed"
        )
    found = {**_declared, **{name: _of_settings(name) for name in conf.get().schedules or ()}}
    declared = [Declared(name, found[name].columns()) for name in sorted(found)]
    return store.in_transaction(lambda tx: store.sync_schedules(tx, source(), declared))


def source() -> str:
    """Return whose schedules this process declares: ``RELAY["PROJECT"]``, or the settings' package."""
    settings = os.environ.get(ENVIRONMENT_VARIABLE, "")
    return f"code:{conf.get().project or settings.partition('.')[0] or 'project'}"


def _of_settings(name: str) -> _Declaration:
    entry = dict((conf.get().schedules or {})[name])
    path, zone = str(entry.pop("task")), entry.pop("zone", "UTC")
    if ("cron" in entry) is ("every" in entry):
        raise InvalidSchedule(f'RELAY["SCHEDULES"][{name!r}] must have either "cron" or "every"')
    timing = Cron(entry.pop("cron"), zone) if "cron" in entry else every(entry.pop("every"))
    alias = entry.pop("backend", "default")
    try:
        task = as_enqueued(path, alias, "default", 0)
        made = _Declaration(name, task, timing, **entry)
    except (InvalidJob, TypeError) as error:
        raise InvalidSchedule(f'RELAY["SCHEDULES"][{name!r}]: {error}') from error
    made.require_sense()
    return made


def pause(name: str) -> bool:
    """Let a schedule stand still. Its slots meanwhile do not run later. False if it is paused already.

    Raises `InvalidSchedule` if there is none of this name.
    """
    return store.in_transaction(lambda tx: store.pause_schedule(tx, name))


def resume(name: str) -> bool:
    """Let a paused schedule go on from now. False if it is not paused. Raises like `pause`."""
    return store.in_transaction(lambda tx: store.resume_schedule(tx, name))


def run(name: str) -> int:
    """Enqueue the job of a schedule now, beside its slots; return the job's id. Raises like `pause`."""
    return store.in_transaction(lambda tx: store.run_schedule(tx, name))


def next_runs(name: str, count: int = 10) -> list[datetime]:
    """Return the next slots of a schedule, at most ``count``, in aware UTC; none while it stands still.

    Raises like `pause`.
    """
    found = runs.schedule(name)
    if found is None:
        raise InvalidSchedule(f"there is no schedule {name!r}")
    slots: list[datetime] = []
    slot = found.next_at
    while slot is not None and len(slots) < count:
        slots.append(slot)
        slot = next_slot(found.columns, slot)
    return slots


def _require_name(name: object) -> None:
    plain = isinstance(name, str) and name.isprintable() and name == name.strip()
    if not plain or not 1 <= len(str(name)) <= MAX_NAME_CHARS or {"@", "!"} & set(str(name)):
        raise InvalidSchedule(
            f"the name of a schedule is {shown(name)}; use 1 to {MAX_NAME_CHARS} printable characters "
            "without @ and !"
        )
