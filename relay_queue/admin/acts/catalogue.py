"""The acts: what the console does with the table of operations, and what it says of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from django import forms
from django.utils.text import format_lazy, get_text_list
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from relay_queue import operations, store
from relay_queue.models import Job, Queue, Worker
from relay_queue.operations import Button, JobOperation, QueueOperation, WorkerOperation
from relay_queue.ranking import MAX_PRIORITY, MIN_PRIORITY
from relay_queue.states import State, WorkerOrder

APP: Final = "relay_queue"
Key = int | str


@dataclass(frozen=True, slots=True)
class Done:
    """What an act did: per row what changed, and per row that it passed over, why."""

    changed: dict[Any, str] = field(default_factory=dict)
    skipped: dict[Any, str] = field(default_factory=dict)


class ActVerb(Protocol):
    """Does an act on some rows, in one transaction, with what the operator has filled in."""

    def __call__(self, tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
        """Do it; a row that has moved on is passed over and named."""


class PriorityForm(forms.Form):
    """Asks for the new priority."""

    priority = forms.IntegerField(
        label=_("New priority"),
        min_value=MIN_PRIORITY,
        max_value=MAX_PRIORITY,
        help_text=format_lazy(
            _("{low} to {high}; higher goes first."), low=MIN_PRIORITY, high=MAX_PRIORITY
        ),
    )


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that an operator may do to rows of one table.

    ``effect`` is what the confirmation says; ``confirm`` asks for one, ``dangerous`` paints it red.
    ``why_not`` returns why a row, as it was read, cannot take the act; empty if it can.
    ``heavy`` are fields that a row's name needs not and that may be large.
    """

    name: str
    label: Any
    permission: str
    effect: Any
    verb: ActVerb
    why_not: Callable[[Any], Any]
    confirm: bool = False
    dangerous: bool = False
    form: type[forms.Form] | None = None
    deletes: bool = False
    heavy: tuple[str, ...] = ()

    @property
    def codename(self) -> str:
        """The permission as ``has_perm`` wants it."""
        return f"{APP}.{self.permission}"


@dataclass(frozen=True, slots=True)
class JobAct(Act):
    """An act on jobs, which only jobs in some ``states`` can take."""

    states: frozenset[State] = frozenset()
    heavy: tuple[str, ...] = ("payload", "result")


def _job_act(operation: JobOperation, button: Button) -> JobAct:
    """Return the act of a button: the operation, or the part of it that is for the button's states."""
    states = button.states or operation.states
    options = {} if button.states is None else {"states": states}

    def do(tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
        return _told(operation.verb(tx, keys, **options, **given), operation.to, given)

    return JobAct(
        button.name,
        button.label,
        button.permission,
        operation.effect,
        do,
        partial(_why_job_cannot, states),
        confirm=operation.dangerous,
        dangerous=operation.dangerous,
        form=None if operation.number is None else PriorityForm,
        deletes=operation.deletes,
        states=states,
    )


def _told(changed: store.Changed, to_state: State | None, given: dict[str, Any]) -> Done:
    """Say of each job what changed, or in which state it was found."""
    if to_state is None:
        went = dict.fromkeys(changed.job_ids, ", ".join(f"{k} to {v}" for k, v in given.items()))
    else:
        before = changed.before
        went = {job_id: f"state from {before[job_id]} to {to_state}" for job_id in changed.job_ids}
    return Done(went, {job_id: _now(state) for job_id, state in changed.skipped.items()})


def _now(state: str) -> str:
    label = State(state).label.lower() if state in State.values else state
    return gettext("It has moved on already: it is %s now.") % label


def _why_job_cannot(states: frozenset[State], job: Job) -> Any:
    if job.state in states:
        return ""
    names = get_text_list([str(State(state).label).lower() for state in State if state in states])
    return format_lazy(_("Only for jobs that are {states}."), states=names)


JOB_ACTS: Final[tuple[JobAct, ...]] = tuple(
    _job_act(operation, button)
    for operation in operations.JOB_OPERATIONS
    for button in operation.buttons
)
"""The acts on jobs, the harmless ones first."""


def _queue_act(operation: QueueOperation, button: Button) -> Act:
    change = "claims to paused" if operation.pauses else "claims to open"

    def do(tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
        changed = [name for name in keys if operation.verb(tx, name)]
        passed = [name for name in keys if name not in changed]
        why = str(operation.already)
        return Done(dict.fromkeys(changed, change), dict.fromkeys(passed, why))

    def why_not(queue: Queue) -> Any:
        return operation.already if bool(queue.paused_at) is operation.pauses else ""

    return Act(button.name, button.label, button.permission, operation.effect, do, why_not)


QUEUE_ACTS: Final[tuple[Act, ...]] = tuple(
    _queue_act(operation, button)
    for operation in operations.QUEUE_OPERATIONS
    for button in operation.buttons
)
"""The acts on queues."""


def _worker_act(operation: WorkerOperation, button: Button) -> Act:
    order = operation.order

    def do(tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
        told = store.order_workers(tx, keys, order)
        passed = [key for key in keys if key not in set(told)]
        why = str(_("It has ended, or was told to stop, already."))
        return Done(dict.fromkeys(told, f"order to {order or 'none'}"), dict.fromkeys(passed, why))

    def why_not(worker: Worker) -> Any:
        if worker.stopped_at is not None:
            return _("It has ended.")
        if worker.ordered == WorkerOrder.STOP:
            return operations.STOP.already
        return operation.already if worker.ordered == (order or "") else ""

    return Act(
        button.name,
        button.label,
        button.permission,
        operation.effect,
        do,
        why_not,
        confirm=operation.dangerous,
        dangerous=operation.dangerous,
    )


WORKER_ACTS: Final[tuple[Act, ...]] = tuple(
    _worker_act(operation, button)
    for operation in operations.WORKER_OPERATIONS
    for button in operation.buttons
)
"""The acts on workers."""


def job_act(name: str) -> JobAct | None:
    """Return the act on jobs that has this name."""
    return next((act for act in JOB_ACTS if act.name == name), None)
