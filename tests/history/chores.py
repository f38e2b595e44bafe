"""The functions and clients of the test of processes: they write down what they do, outside Relay."""

from __future__ import annotations

import random
import time
from datetime import timedelta

from django.contrib.auth.models import Group
from django.db import transaction
from django.utils import timezone

from relay_queue.backoff import Backoff
from relay_queue.context import RelayContext
from relay_queue.task import task
from tests.history.journal import Journal

SOON = Backoff(base_seconds=0.01, max_seconds=0.1)

KEYS = 5
"""Few, so that clients meet on them."""


@task(takes_context=True, backoff=SOON)
def noted(context: RelayContext, journal: str, label: str, seconds: float, fails: int) -> None:
    """Say when this begins and ends; fail in the first attempts."""
    book = Journal(journal)
    facts = {"job": context.job_id, "lease": context.epoch, "label": label}
    book.note("run", "start", attempt=context.attempt, **facts)
    time.sleep(seconds)
    fail = context.attempt <= fails
    book.note("run", "end", verb="nack" if fail else "ack", **facts)
    if fail:
        raise ValueError(f"attempt {context.attempt}")


class ChangedMind(Exception):
    """Rolls a client's transaction back."""


def produce(journal: str, name: str, count: int, slow: float) -> None:
    """Enqueue ``count`` times in all the ways there are; ``slow`` is the share of long jobs."""
    dice = random.Random(name)
    for number in range(count):
        _enqueue(Journal(journal), f"{name}.{number}", dice, slow)


def _enqueue(book: Journal, label: str, dice: random.Random, slow: float) -> None:
    delay = dice.choice((0, 0, 0, 0, 0.5))
    due = timezone.now() + timedelta(seconds=delay)
    key = label = f"key.{dice.randrange(KEYS)}" if dice.random() < 0.05 else label
    # Calls on one key are the same call.
    mine = random.Random(key) if key.startswith("key.") else dice
    seconds, fails = (
        mine.choice((0.05, 0.3)) * (mine.random() < slow),
        mine.choice((0,) * 8 + (1, 9)),
    )
    limit = 6 if fails < 9 else 2
    bound = noted.using(
        max_attempts=limit,
        run_after=due if delay else None,
        idempotency_key=key if key.startswith("key.") else None,
    )
    facts = {} if key.startswith("key.") else {"due": due.isoformat() if delay else None}
    op = f"{label} {time.monotonic_ns()}"
    book.note("enqueue", "invoke", op=op, label=label, limit=limit, **facts)
    try:
        with transaction.atomic():
            Group.objects.create(name=op)
            job = bound.enqueue(journal=book.path, label=label, seconds=seconds, fails=fails)
            if dice.random() < 0.1:
                raise ChangedMind
    except ChangedMind:
        book.note("enqueue", "nothing", op=op)
    else:
        book.note("enqueue", "ok", op=op, job=int(job.id))
