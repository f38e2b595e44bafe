"""The acts: their words, their permissions, what they apply to, and the verb of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from django import forms
from django.utils.text import format_lazy, get_text_list
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from relay_queue import store
from relay_queue.models import Job, Queue, Worker
from relay_queue.ranking import MAX_PRIORITY, MIN_PRIORITY
from relay_queue.states import (
    CANCELLABLE,
    DISCARDABLE,
    RELEASABLE,
    REQUEUEABLE,
    WAITING,
    State,
    WorkerOrder,
)

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


def _job_act(
    name: str,
    label: Any,
    permission: str,
    effect: Any,
    *,
    verb: Callable[..., store.Changed],
    states: frozenset[State],
    to: State | None = None,
    **options: Any,
) -> JobAct:
    """Return an act that a verb of the store does, and that takes jobs ``to`` a state if it moves them."""

    def do(tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
        return _told(verb(tx, keys, **given), to, given)

    why_not = partial(_why_job_cannot, states)
    return JobAct(name, label, permission, effect, do, why_not, states=states, **options)


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


RUN_NOW_EFFECT: Final = _("Ready at once. The budget of attempts stays as it is.")

JOB_ACTS: Final[tuple[JobAct, ...]] = (
    _job_act(
        "retry_now",
        _("Retry now"),
        "retry_job",
        RUN_NOW_EFFECT,
        verb=partial(store.run_now, states=frozenset({State.RETRYING})),
        states=frozenset({State.RETRYING}),
        to=State.READY,
    ),
    _job_act(
        "requeue",
        _("Retry with fresh attempts"),
        "requeue_job",
        _("Ready again, with a fresh budget of attempts."),
        verb=store.requeue,
        states=REQUEUEABLE,
        to=State.READY,
    ),
    _job_act(
        "run_now",
        _("Run now"),
        "run_job",
        RUN_NOW_EFFECT,
        verb=partial(store.run_now, states=frozenset({State.SCHEDULED})),
        states=frozenset({State.SCHEDULED}),
        to=State.READY,
    ),
    _job_act(
        "prioritise",
        _("Change priority"),
        "prioritise_job",
        _("A new place in the queue; the time that was waited goes on counting."),
        verb=store.set_priority,
        states=WAITING,
        form=PriorityForm,
    ),
    _job_act(
        "release",
        _("Release lease"),
        "release_job",
        _(
            "Taken from the worker and ready again; the attempt is not charged. The function is told "
            "to stop but may go on for a while, beside the next attempt."
        ),
        verb=store.release_leases,
        states=RELEASABLE,
        to=State.READY,
        confirm=True,
        dangerous=True,
    ),
    _job_act(
        "cancel",
        _("Cancel"),
        "cancel_job",
        _("Cancelled at once. A function that runs is told to stop, and its result is refused."),
        verb=store.cancel,
        states=CANCELLABLE,
        to=State.CANCELLED,
        confirm=True,
        dangerous=True,
    ),
    _job_act(
        "discard",
        _("Discard"),
        "discard_job",
        _("Deleted for good, with the record of every attempt."),
        verb=store.discard,
        states=DISCARDABLE,
        confirm=True,
        dangerous=True,
        deletes=True,
    ),
)
"""The acts on jobs, the harmless ones first."""


def _pause(tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
    paused = [name for name in keys if store.pause(tx, name)]
    passed = [name for name in keys if name not in paused]
    why = str(_("It is paused already."))
    return Done(dict.fromkeys(paused, "claims to paused"), dict.fromkeys(passed, why))


def _resume(tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]) -> Done:
    opened = [name for name in keys if store.resume(tx, name)]
    passed = [name for name in keys if name not in opened]
    why = str(_("It is not paused."))
    return Done(dict.fromkeys(opened, "claims to open"), dict.fromkeys(passed, why))


def _if_paused(queue: Queue) -> Any:
    return "" if queue.paused_at else _("It is not paused.")


def _if_open(queue: Queue) -> Any:
    return _("It is paused already.") if queue.paused_at else ""


QUEUE_ACTS: Final[tuple[Act, ...]] = (
    Act(
        "pause",
        _("Pause"),
        "pause_queue",
        _("Workers claim nothing more. What runs is finished, and enqueues go on."),
        _pause,
        _if_open,
    ),
    Act("resume", _("Resume"), "pause_queue", _("Workers claim again."), _resume, _if_paused),
)
"""The acts on queues."""


def _order(
    order: WorkerOrder | None, tx: store.Transaction, keys: Sequence[Any], given: dict[str, Any]
) -> Done:
    told = store.order_workers(tx, keys, order)
    passed = [key for key in keys if key not in set(told)]
    why = _("It has ended, or was told to stop, already.")
    return Done(dict.fromkeys(told, f"order to {order or 'none'}"), dict.fromkeys(passed, str(why)))


def _why_worker_cannot(order: WorkerOrder | None, worker: Worker) -> Any:
    if worker.stopped_at is not None:
        return _("It has ended.")
    if worker.ordered == WorkerOrder.STOP:
        return _("It was told to stop.")
    if worker.ordered == (order or ""):
        return _("It is quiet already.") if order else _("It was not told to be quiet.")
    return ""


WORKER_ACTS: Final[tuple[Act, ...]] = (
    Act(
        "quiet",
        _("Quiet"),
        "stop_worker",
        _("Claims nothing more, finishes what runs, and stays."),
        partial(_order, WorkerOrder.QUIET),
        partial(_why_worker_cannot, WorkerOrder.QUIET),
    ),
    Act(
        "serve",
        _("Serve again"),
        "stop_worker",
        _("Claims again."),
        partial(_order, None),
        partial(_why_worker_cannot, None),
    ),
    Act(
        "stop",
        _("Stop"),
        "stop_worker",
        _(
            "Finishes what runs within the shutdown timeout, hands back the rest, and ends. The "
            "supervisor does not replace it. Nothing takes this back."
        ),
        partial(_order, WorkerOrder.STOP),
        partial(_why_worker_cannot, WorkerOrder.STOP),
        confirm=True,
        dangerous=True,
    ),
)
"""The acts on workers."""


def job_act(name: str) -> JobAct | None:
    """Return the act on jobs that has this name."""
    return next((act for act in JOB_ACTS if act.name == name), None)
