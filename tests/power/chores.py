"""What the jobs of the recorded load do. Each notes that it has begun: its claim must survive."""

from __future__ import annotations

from django.contrib.auth.models import Group
from django.db import transaction

from relay_queue.backoff import Backoff
from relay_queue.context import RelayContext
from relay_queue.exceptions import Snooze
from relay_queue.task import task
from tests.power.stamp import stamp

AT_ONCE = Backoff(base_seconds=0.01, max_seconds=0.01)


def begin(context: RelayContext) -> None:
    stamp(what="claimed", job=context.job_id, lease=context.epoch)


@task(takes_context=True)
def succeed(context: RelayContext, text: str) -> str:
    begin(context)
    return text


@task(takes_context=True, backoff=AT_ONCE, max_attempts=2)
def fail(context: RelayContext, text: str) -> None:
    begin(context)
    if context.attempt == 1 or context.job_id % 2:
        raise ValueError(text[:100])


@task(takes_context=True)
def snooze(context: RelayContext, text: str) -> None:
    begin(context)
    if context.epoch % 3:
        raise Snooze(0.01)


@task(takes_context=True, atomic=True, timeout_seconds=2)
def write(context: RelayContext, text: str) -> None:
    """Write a row in the transaction of the ack: one is there if and only if the other is."""
    begin(context)
    acked = {"what": "ack", "job": context.job_id, "lease": context.epoch, "state": "succeeded"}
    transaction.on_commit(lambda: stamp(**acked))
    Group.objects.create(name=f"job {context.job_id}")
