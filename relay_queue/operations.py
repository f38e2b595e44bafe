"""What an operator may do to jobs, queues and workers: each operation once, with all that is said of it.

The verbs of ``manage.py relay``, the buttons of the console and `relay_queue.api` are made from
these tables. A new operation is a verb of the store and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from django.utils.translation import gettext_lazy as _

from relay_queue import store
from relay_queue.exceptions import InvalidTransition, JobNotFound
from relay_queue.ranking import MAX_PRIORITY, MIN_PRIORITY
from relay_queue.states import (
    CANCELLABLE,
    DISCARDABLE,
    NOT_DUE,
    RELEASABLE,
    REQUEUEABLE,
    WAITING,
    State,
    WorkerOrder,
)
from relay_queue.store.operate import BATCH


class Button(NamedTuple):
    """An operation at the console: its name in addresses and in the log, its words, who may.

    ``permission`` is a codename of the app ``relay_queue``. ``states`` are those of jobs that the
    button is for, if it is for a part of what the operation is for.
    """

    name: str
    label: Any
    permission: str
    states: frozenset[State] | None = None


class Number(NamedTuple):
    """A whole number that an operation needs: its name in the store, and its bounds."""

    name: str
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that an operator may do.

    ``command`` is the verb of ``relay``; empty if it is an option of another. ``summary`` stands in
    the list of verbs and ``help`` in the help of the verb. ``effect`` is what the console tells
    before, and ``dangerous`` makes it ask first. ``done`` is what the command tells afterwards.
    """

    command: str
    summary: str = ""
    help: str = ""
    done: str = ""
    effect: Any = ""
    buttons: tuple[Button, ...] = ()
    dangerous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOperation(Operation):
    """An operation on jobs in some ``states``, done by a ``verb`` of the store.

    It moves them ``to`` a state, ``deletes`` them, or needs a ``number`` and leaves their states as
    they are. ``question`` is what the command asks before it changes many. Numbers are filled into
    ``question`` and ``done`` by name.
    """

    verb: Callable[..., store.Changed]
    states: frozenset[State]
    to: State | None = None
    deletes: bool = False
    number: Number | None = None
    question: str

    @property
    def listed_states(self) -> list[State]:
        """The states in the order of a job's life."""
        return [state for state in State if state in self.states]

    def change(self, job_ids: Iterable[int], **given: int) -> Iterator[store.Changed]:
        """Do it to jobs, in transactions of at most ``BATCH`` of them; yield what each has done.

        A transaction that deletes is bounded in leases, too, and may leave some jobs to the next.
        Inside the caller's transaction all of them are part of that. Raises what the store raises:
        the batch at hand is not changed then, and those before it stay as they are.
        """
        ids = iter(dict.fromkeys(job_ids))
        while batch := list(islice(ids, BATCH)):
            while batch:
                changed = store.in_transaction(partial(self.verb, job_ids=batch, **given))
                batch = changed.left
                yield changed

    def change_one(self, tx: store.Transaction, job_id: int, /, **given: int) -> bool:
        """Do it to one job; False if the transaction had no room for all of it, and it wants another.

        Raises `JobNotFound`, or `InvalidTransition` in another state.
        """
        changed = self.verb(tx, [job_id], **given)
        if changed.missing:
            raise JobNotFound(job_id)
        for state in changed.skipped.values():
            raise InvalidTransition(
                job_id, state, self.to, operation=self.command, states=self.listed_states
            )
        return not changed.left


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOperation(Operation):
    """An operation on a queue as a whole, by a ``verb`` of the store.

    The verb says whether it changed anything; ``already`` is why not. ``change`` is what the log
    says, and ``facts`` is what the command prints as JSON beside the queue's name.
    """

    verb: Callable[[store.Transaction, str], bool]
    change: str
    facts: dict[str, bool]
    already: Any
    deletes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOperation(Operation):
    """An order to workers; None takes back that they are to be quiet.

    ``undo`` is the operation that takes this one back, an option of the same command.
    ``already`` is why a worker cannot take it that stands so.
    """

    order: WorkerOrder | None
    undo: WorkerOperation | None = None
    already: Any


RUN_NOW: Final = JobOperation(
    command="run-now",
    summary="make waiting jobs ready before their time",
    help=(
        "Make jobs ready that are scheduled for later or wait for their next attempt, by id or by "
        "filters. Their budget of attempts stays as it is. Exits with 1 if a job that was named is "
        "not there or does not wait."
    ),
    question="run now",
    done="Made ready",
    effect=_("Ready at once. The budget of attempts stays as it is."),
    verb=store.run_now,
    states=NOT_DUE,
    to=State.READY,
    buttons=(
        Button("retry_now", _("Retry now"), "retry_job", frozenset({State.RETRYING})),
        Button("run_now", _("Run now"), "run_job", frozenset({State.SCHEDULED})),
    ),
)

REQUEUE: Final = JobOperation(
    command="requeue",
    summary="put dead or cancelled jobs back",
    help=(
        "Put dead or cancelled jobs back to ready with a fresh budget of attempts, by id or by "
        "filters. Exits with 1 if a job that was named is not there or in another state."
    ),
    question="requeue",
    done="Requeued",
    effect=_("Ready again, with a fresh budget of attempts."),
    verb=store.requeue,
    states=REQUEUEABLE,
    to=State.READY,
    buttons=(Button("requeue", _("Retry with fresh attempts"), "requeue_job"),),
)

SET_PRIORITY: Final = JobOperation(
    command="priority",
    summary="change the priority of jobs that wait",
    help=(
        "Change the priority of jobs that wait, by id or by filters. The time that they have waited "
        "goes on counting. Exits with 1 if a job that was named is not there, runs, or has "
        "finished."
    ),
    question="give priority {priority} to",
    done="Gave priority {priority} to",
    effect=_("A new place in the queue; the time that was waited goes on counting."),
    verb=store.set_priority,
    states=WAITING,
    number=Number("priority", MIN_PRIORITY, MAX_PRIORITY),
    buttons=(Button("prioritise", _("Change priority"), "prioritise_job"),),
)

RELEASE: Final = JobOperation(
    command="release",
    summary="take running jobs from their workers",
    help=(
        "End the leases of running jobs and make the jobs ready again, uncharged, by id or by "
        "filters. Their functions are told, but may go on for a while: the next attempt can overlap "
        "with them. Exits with 1 if a job that was named is not there or does not run."
    ),
    question="release",
    done="Released",
    effect=_(
        "Taken from the worker and ready again; the attempt is not charged. The function is told "
        "to stop but may go on for a while, beside the next attempt."
    ),
    verb=store.release_leases,
    states=RELEASABLE,
    to=State.READY,
    dangerous=True,
    buttons=(Button("release", _("Release lease"), "release_job"),),
)

CANCEL: Final = JobOperation(
    command="cancel",
    summary="cancel unfinished jobs",
    help=(
        "Cancel unfinished jobs at once, by id or by filters. A job that runs loses its lease: its "
        "function is told, and a late result is refused. Exits with 1 if a job that was named is "
        "not there or finished already."
    ),
    question="cancel",
    done="Cancelled",
    effect=_("Cancelled at once. A function that runs is told to stop, and its result is refused."),
    verb=store.cancel,
    states=CANCELLABLE,
    to=State.CANCELLED,
    dangerous=True,
    buttons=(Button("cancel", _("Cancel"), "cancel_job"),),
)

DISCARD: Final = JobOperation(
    command="discard",
    summary="delete dead letters",
    help=(
        "Delete dead letters with their ledger for good, by id or by filters. Exits with 1 if a job "
        "that was named is not there or is not dead."
    ),
    question="discard",
    done="Discarded",
    effect=_("Deleted for good, with the record of every attempt."),
    verb=store.discard,
    states=DISCARDABLE,
    deletes=True,
    dangerous=True,
    buttons=(Button("discard", _("Discard"), "discard_job"),),
)

JOB_OPERATIONS: Final = (RUN_NOW, REQUEUE, SET_PRIORITY, RELEASE, CANCEL, DISCARD)
"""The operations on jobs, the harmless ones first."""

PAUSE: Final = QueueOperation(
    command="pause",
    summary="stop claiming from a queue",
    help=(
        "Stop claiming jobs from a queue. Jobs that run are finished, and enqueues are still "
        "accepted."
    ),
    done="Queue {queue} is paused. relay resume {queue} opens it again.",
    effect=_("Workers claim nothing more. What runs is finished, and enqueues go on."),
    verb=store.pause,
    change="claims to paused",
    facts={"paused": True},
    already=_("It is paused already."),
    buttons=(Button("pause", _("Pause"), "pause_queue"),),
)

RESUME: Final = QueueOperation(
    command="resume",
    summary="claim from a paused queue again",
    help="Claim jobs from a paused queue again.",
    done="Queue {queue} is open.",
    effect=_("Workers claim again."),
    verb=store.resume,
    change="claims to open",
    facts={"paused": False},
    already=_("It is not paused."),
    buttons=(Button("resume", _("Resume"), "pause_queue"),),
)

DELETE_QUEUE: Final = QueueOperation(
    command="delete-queue",
    summary="delete a queue that has no job",
    help=(
        "Delete a queue that has no job, finished ones included, with its limits and its pause. The "
        "next enqueue makes it again. Its statistics stay until they are pruned. Exits with 1 if it "
        "has jobs."
    ),
    done="Queue {queue} is deleted.",
    effect=_("Its limits and its pause go with it. The next enqueue makes it again."),
    verb=store.delete_queue,
    change="deleted",
    facts={"deleted": True},
    already=_("It is not there any more."),
    deletes=True,
    dangerous=True,
    buttons=(Button("delete_queue", _("Delete"), "delete_queue"),),
)

QUEUE_OPERATIONS: Final = (PAUSE, RESUME, DELETE_QUEUE)
"""The operations on a queue as a whole."""

SET_LIMITS: Final = Operation(
    command="limits",
    summary="show or change the limits of a queue",
    help=(
        "Show the limits of a queue, or change those that are given. Workers obey at their next "
        "claim; jobs that are there stay."
    ),
    done="Queue {queue}: capacity {capacity}, max running {max_running}.",
    buttons=(Button("limits", _("Limits"), "limit_queue"),),
)

RERANK: Final = Operation(
    command="rerank",
    summary="change how fast the jobs of a queue age",
    help=(
        "Change how many seconds of waiting are worth one priority class in a queue, and rewrite "
        "the order of its unfinished jobs, in small transactions beside live workers."
    ),
    done="Queue {queue} now has {how}; {jobs} jobs were given their new rank.",
)

SERVE: Final = WorkerOperation(
    command="",
    done="Told to claim again",
    effect=_("Claims again."),
    order=None,
    already=_("It was not told to be quiet."),
    buttons=(Button("serve", _("Serve again"), "stop_worker"),),
)

QUIET: Final = WorkerOperation(
    command="quiet",
    summary="let workers claim nothing more",
    help=(
        "Tell workers to claim nothing more. They finish what they run and stay. Exits with 1 if "
        "one of them has ended, or was told to stop, already."
    ),
    done="Told to claim nothing more",
    effect=_("Claims nothing more, finishes what runs, and stays."),
    order=WorkerOrder.QUIET,
    undo=SERVE,
    already=_("It is quiet already."),
    buttons=(Button("quiet", _("Quiet"), "stop_worker"),),
)

STOP: Final = WorkerOperation(
    command="stop-worker",
    summary="end worker processes that a supervisor would keep up",
    help=(
        "Tell worker processes to end as after SIGTERM: they claim nothing more, finish what they "
        "run within their shutdown timeout, and hand back the rest. Their supervisor does not "
        "replace them, and ends with the last of them. Exits with 1 if one of them has ended, or "
        "was told to stop, already."
    ),
    done="Told to stop",
    effect=_(
        "Finishes what runs within the shutdown timeout, hands back the rest, and ends. The "
        "supervisor does not replace it. Nothing takes this back."
    ),
    order=WorkerOrder.STOP,
    already=_("It was told to stop."),
    dangerous=True,
    buttons=(Button("stop", _("Stop"), "stop_worker"),),
)

WORKER_OPERATIONS: Final = (QUIET, SERVE, STOP)
"""The orders to workers."""
