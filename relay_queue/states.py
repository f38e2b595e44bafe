"""The life of a job: its states, the legal transitions, the outcomes of a lease, orders to workers.

This is the only definition. The store, the buttons of the admin, ``relay verify`` and the property
tests all read it from here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _


class State(TextChoices):
    """Where a job is in its life. The value is what the table holds."""

    SCHEDULED = "scheduled", _("Scheduled")
    READY = "ready", _("Ready")
    RUNNING = "running", _("Running")
    RETRYING = "retrying", _("Retrying")
    SUCCEEDED = "succeeded", _("Succeeded")
    DEAD = "dead", _("Dead")
    CANCELLED = "cancelled", _("Cancelled")


class Outcome(TextChoices):
    """How a lease ended. A lease without an outcome is open."""

    ACKED = "acked", _("Acked")
    FAILED = "failed", _("Failed")
    FATAL = "fatal", _("Fatal")
    TIMED_OUT = "timed_out", _("Timed out")
    EXPIRED = "expired", _("Expired")
    LOST = "lost", _("Lost")
    RELEASED = "released", _("Released")
    UNRUN = "unrun", _("Not begun")
    SNOOZED = "snoozed", _("Snoozed")
    CANCELLED = "cancelled", _("Cancelled")


class RunOutcome(TextChoices):
    """What became of one slot of a schedule."""

    ENQUEUED = "enqueued", _("enqueued")
    SKIPPED = "skipped", _("skipped")
    MISSED = "missed", _("missed")
    REFUSED = "refused", _("refused")


class Missed(TextChoices):
    """Which of the slots run that came while no worker was there."""

    ONCE = "once", _("the newest")
    SKIP = "skip", _("none")
    ALL = "all", _("all")


class Overlap(TextChoices):
    """What happens at a slot while the job of the one before it is unfinished."""

    SKIP = "skip", _("skip the slot")
    ALLOW = "allow", _("run both")
    CANCEL = "cancel", _("cancel the other")


class WorkerOrder(TextChoices):
    """An operator's order to a worker process. Without one it serves."""

    QUIET = "quiet", _("Claim nothing more, and stay")
    STOP = "stop", _("Finish what runs, and end")


TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    State.SCHEDULED: frozenset({State.READY, State.CANCELLED}),
    # READY -> DEAD only when the claim finds an altered payload.
    State.READY: frozenset({State.RUNNING, State.CANCELLED, State.DEAD}),
    State.RUNNING: frozenset(
        {
            State.SUCCEEDED,
            State.RETRYING,
            State.SCHEDULED,  # snoozed
            State.READY,  # released, or lost for the first time in a row
            State.DEAD,
            State.CANCELLED,
        }
    ),
    State.RETRYING: frozenset({State.READY, State.CANCELLED}),
    State.SUCCEEDED: frozenset(),
    State.DEAD: frozenset({State.READY}),
    State.CANCELLED: frozenset({State.READY}),
}

TERMINAL: Final = frozenset({State.SUCCEEDED, State.DEAD, State.CANCELLED})
UNFINISHED: Final = frozenset(State) - TERMINAL
CANCELLABLE: Final = frozenset(s for s in State if State.CANCELLED in TRANSITIONS[s])
REQUEUEABLE: Final = frozenset({State.DEAD, State.CANCELLED})
DISCARDABLE: Final = frozenset({State.DEAD})
RELEASABLE: Final = frozenset({State.RUNNING})
CAN_GO_DEAD: Final = frozenset(s for s in State if State.DEAD in TRANSITIONS[s])
# Not ready before their time.
NOT_DUE: Final = frozenset({State.SCHEDULED, State.RETRYING})
# Jobs that will run and do not run now: their place in the queue can change.
WAITING: Final = NOT_DUE | {State.READY}

# An uncharged lease gives its attempt back; every other one has used it up for good.
UNCHARGED: Final = frozenset({Outcome.RELEASED, Outcome.UNRUN, Outcome.SNOOZED})

# The newest leases of a job that stay while it is in the tables. A longer ledger loses its oldest
# leases: those of a finished job that is being pruned, and the uncharged ones of any job.
KEPT_LEASES: Final = 100

# Outcomes that the function itself gave. After any other end it is unknown whether it had its
# effect.
ANSWERED: Final = frozenset({Outcome.ACKED, Outcome.FAILED, Outcome.FATAL, Outcome.SNOOZED})

# Every end but the usual one, in an order: an index is made of this list and queries must repeat it.
NOT_ACKED: Final = tuple(outcome.value for outcome in Outcome if outcome is not Outcome.ACKED)

# Ends that took the job from an owner that may still have been running it. The effect of such an
# attempt is unknown, and the next one may repeat it. In an order, as above.
INTERRUPTED: Final = tuple(end.value for end in (Outcome.TIMED_OUT, Outcome.EXPIRED, Outcome.LOST))

# For each terminal state, the outcomes that the newest lease may have. None stands for a job that
# was never leased since it was enqueued or requeued: cancelled before a claim, or found altered.
_ALL_BUT_ACKED = frozenset({None, *Outcome}) - {Outcome.ACKED}
LAST_OUTCOMES: Final[dict[State, frozenset[Outcome | None]]] = {
    State.SUCCEEDED: frozenset({Outcome.ACKED}),
    State.DEAD: _ALL_BUT_ACKED,
    State.CANCELLED: _ALL_BUT_ACKED,
}


def sql_list(values: Collection[str]) -> str:
    """Return states, or outcomes, as they stand between the parentheses of an SQL ``IN``.

    In the order of their definition: a partial index serves only a query that repeats its condition
    to the letter.
    """
    order: type[TextChoices] = State if set(values) <= set(State) else Outcome
    return ", ".join(f"'{value}'" for value in order if value in values)


def can(from_state: str, to_state: str) -> bool:
    """Say whether a job may go from one state to the other. Unknown states may go nowhere."""
    return from_state in TRANSITIONS and to_state in TRANSITIONS[State(from_state)]


LAST_FAILURE = "job %s will not be tried again, since %s: %s"
"""The line of the log about a job that went dead: its id, why, and the message of its last failure."""

ROW_ALTERED = "its row was altered"


def why_last(*, fatal: bool, attempt: int) -> str:
    """Return why a failed attempt, of this number, was the last of its job."""
    return "its failure is fatal" if fatal else f"attempt {attempt} was its last"
