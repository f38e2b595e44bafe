"""How often the function of a job ran, judged by the ledger alone.

The rules are here once, for one job at a time; `relay_queue.query.ledger` says the same in SQL.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

from relay_queue.states import ANSWERED, Outcome


class Verdict(TextChoices):
    """How often the function of a job ran. The value is what filters and programs say."""

    NEVER_STARTED = "never", _("never started")
    RUNNING = "running", _("running")
    RAN_ONCE = "once", _("ran once")
    INTERRUPTED = "interrupted", _("interrupted, effect unknown")
    RAN_AGAIN = "repeated", _("ran more than once")


ANSWERING_VERBS: Final = frozenset({"ack", "snooze"})
"""Late words that only a function which came to its end can have caused. A late nack is none: the
worker says it, too, of a function that ran past its time and has not ended."""

CUT_SHORT: Final = frozenset(Outcome) - ANSWERED - {Outcome.UNRUN}
"""Ends of a lease that say nothing of its function. *Released* is among them: an owner hands a job
back when it must stop or when an operator takes the job, and its function may have begun. *Not begun*
is not: its owner knows that it called no function."""


class Attempt(Protocol):
    """What the verdict looks at of a lease."""

    @property
    def outcome(self) -> str | None:
        """How it ended; None while it is open."""

    @property
    def refused_verb(self) -> str:
        """With which verb its owner came back late; empty if it did not."""


def has_answered(lease: Attempt) -> bool:
    """Say whether the function of an ended lease certainly came to its end.

    It did if its settlement was accepted. It also did if that came too late: the result was
    refused, but the function ran.
    """
    return lease.outcome in ANSWERED or lease.refused_verb in ANSWERING_VERBS


def judge(leases: Collection[Attempt]) -> Verdict:
    """Return the verdict on one job, given all its leases in any order.

    One answer beside an attempt that was cut short is "at least once" at best, so the effect is
    unknown. Two answers are certain in any case.
    """
    ended = [lease for lease in leases if lease.outcome is not None]
    answered = sum(map(has_answered, ended))
    if answered > 1:
        return Verdict.RAN_AGAIN
    if any(lease.outcome in CUT_SHORT and not has_answered(lease) for lease in ended):
        return Verdict.INTERRUPTED
    if len(ended) < len(leases):
        return Verdict.RUNNING
    return Verdict.RAN_ONCE if answered else Verdict.NEVER_STARTED
