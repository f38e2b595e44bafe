"""The actions: the operations of an operator as the console offers and reports them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self

from django import forms
from django.utils.text import format_lazy, get_text_list
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from relay_queue import conf, operations, store
from relay_queue.exceptions import QueueInUse
from relay_queue.models import Job, Queue, Worker
from relay_queue.operations import Button, JobOperation, Operation, QueueOperation, WorkerOperation
from relay_queue.ranking import MAX_PRIORITY, MIN_PRIORITY
from relay_queue.states import State, WorkerOrder

APP: Final = "relay_queue"
Key = int | str


@dataclass(frozen=True, slots=True)
class Done:
    """What an action did: by key what changed, and by key why a row was skipped.

    ``left`` are the keys of rows that the transaction had no room for.
    """

    changed: dict[Any, str] = field(default_factory=dict)
    skipped: dict[Any, str] = field(default_factory=dict)
    left: Sequence[Any] = ()


WhyNot = Callable[[Any], Any]
ActionVerb = Callable[[store.Transaction, Sequence[Any], dict[str, Any]], Done]
"""Performs an action on some rows, in one transaction, with what the operator has filled in.

A row that has changed its state meanwhile is skipped and named.
"""


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
class Action:
    """One thing that an operator may do to rows of one table.

    ``effect`` is the text of the confirmation; ``dangerous`` asks for one and paints it red.
    ``why_not`` returns why a row, as it was read, cannot take the action; empty if it can.
    ``heavy`` are fields that may be large and that the name of a row does not need.
    """

    name: str
    label: Any
    permission: str
    effect: Any
    verb: ActionVerb
    why_not: WhyNot
    dangerous: bool = False
    form: type[forms.Form] | None = None
    deletes: bool = False
    heavy: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, operation: Operation, button: Button, verb: ActionVerb, why_not: WhyNot, **more: Any
    ) -> Self:
        """Return the action of a button of an operation."""
        words = (button.name, button.label, button.permission, operation.effect)
        return cls(*words, verb, why_not, dangerous=operation.dangerous, **more)

    @property
    def codename(self) -> str:
        """The permission as ``has_perm`` wants it."""
        return f"{APP}.{self.permission}"


@dataclass(frozen=True, slots=True)
class JobAction(Action):
    """An action on jobs, which only jobs in some ``states`` can take."""

    states: frozenset[State] = frozenset()
    heavy: tuple[str, ...] = ("payload", "result")


def _job_action(operation: JobOperation, button: Button) -> JobAction:
    """Return the action of a button: the operation, narrowed to the states of the button."""
    states = button.states or operation.states
    options = {} if button.states is None else {"states": states}

    def perform(tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
        return _done(operation.verb(tx, keys, **options, **given), operation.to, given)

    return JobAction.of(
        operation,
        button,
        perform,
        partial(_why_job_cannot, states),
        form=None if operation.number is None else PriorityForm,
        deletes=operation.deletes,
        states=states,
    )


def _done(changed: store.Changed, to_state: State | None, given: dict[str, Any]) -> Done:
    """Return for each job what changed, or the state in which it was found."""
    if to_state is None:
        went = dict.fromkeys(changed.job_ids, ", ".join(f"{k} to {v}" for k, v in given.items()))
    else:
        before = changed.before
        went = {job_id: f"state from {before[job_id]} to {to_state}" for job_id in changed.job_ids}
    skipped = {job_id: _now(state) for job_id, state in changed.skipped.items()}
    return Done(went, skipped, changed.left)


def _now(state: str) -> str:
    label = State(state).label.lower() if state in State.values else state
    return gettext("It has moved on already: it is %s now.") % label


def _why_job_cannot(states: frozenset[State], job: Job) -> Any:
    if job.state in states:
        return ""
    names = get_text_list([str(State(state).label).lower() for state in State if state in states])
    return format_lazy(_("Only for jobs that are {states}."), states=names)


JOB_ACTIONS: Final[tuple[JobAction, ...]] = tuple(
    _job_action(operation, button)
    for operation in operations.JOB_OPERATIONS
    for button in operation.buttons
)
"""The actions on jobs, the harmless ones first."""


def _queue_action(operation: QueueOperation, button: Button) -> Action:
    def perform(tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
        done = Done()
        for name in keys:
            try:
                changed = operation.verb(tx, name)
            except QueueInUse as refusal:
                done.skipped[name] = str(refusal)
            else:
                (done.changed if changed else done.skipped)[name] = (
                    operation.change if changed else str(operation.already)
                )
        return done

    cannot = partial(_why_queue_cannot, operation)
    why_not = _why_queue_has_jobs if operation.deletes else cannot
    return Action.of(operation, button, perform, why_not, deletes=operation.deletes)


def _why_queue_cannot(operation: QueueOperation, queue: Queue) -> Any:
    stands = bool(queue.paused_at) is operation.facts["paused"]
    return operation.already if stands else ""


def _why_queue_has_jobs(queue: Queue) -> Any:
    jobs = Job.objects.using(conf.get().database).filter(queue=queue.pk)
    return _("Only for a queue that has no job, finished ones included.") if jobs.exists() else ""


QUEUE_ACTIONS: Final[tuple[Action, ...]] = tuple(
    _queue_action(operation, button)
    for operation in operations.QUEUE_OPERATIONS
    for button in operation.buttons
)
"""The actions on queues."""


def _worker_action(operation: WorkerOperation, button: Button) -> Action:
    order = operation.order

    def perform(tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
        obeying = store.order_workers(tx, keys, order)
        passed = [key for key in keys if key not in set(obeying)]
        why = str(_("It has ended, or was told to stop, already."))
        return Done(
            dict.fromkeys(obeying, f"order to {order or 'none'}"), dict.fromkeys(passed, why)
        )

    def why_not(worker: Worker) -> Any:
        if worker.stopped_at is not None:
            return _("It has ended.")
        if worker.ordered == WorkerOrder.STOP:
            return operations.STOP.already
        return operation.already if worker.ordered == (order or "") else ""

    return Action.of(operation, button, perform, why_not)


WORKER_ACTIONS: Final[tuple[Action, ...]] = tuple(
    _worker_action(operation, button)
    for operation in operations.WORKER_OPERATIONS
    for button in operation.buttons
)
"""The actions on workers."""


def job_action(name: str) -> JobAction | None:
    """Return the action on jobs of this name; None if there is none."""
    return next((action for action in JOB_ACTIONS if action.name == name), None)
