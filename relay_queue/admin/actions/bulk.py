"""The job that does a bulk act, batch by batch.

This module is imported by the first request for a bulk act, and by the worker that runs it. Only
then are the alias and the queue of the task read from the settings.
"""

from __future__ import annotations

import time
from typing import Final

from django.conf import settings
from django.contrib.auth import get_user_model

from relay_queue import conf, store
from relay_queue.admin.actions import matching
from relay_queue.admin.actions.catalogue import JobAction, job_action
from relay_queue.backend import RelayBackend
from relay_queue.compat import DEFAULT_TASK_QUEUE_NAME, task_backends
from relay_queue.context import RelayContext
from relay_queue.exceptions import ConfigurationError, Fatal, InvalidJob, QueueFull, Snooze
from relay_queue.models import BulkAct
from relay_queue.store.operate import BATCH
from relay_queue.task import task

TURN_SECONDS: Final = 20.0
"""Seconds of work in one attempt; then it snoozes, uncharged, to make room for other jobs."""


def destination() -> tuple[str, str]:
    """Return the alias of ``TASKS`` and the queue for the jobs of bulk acts.

    Raises `ConfigurationError` if no alias or queue serves.
    """
    alias = conf.get().acts_backend or _first_alias()
    if alias not in settings.TASKS or not isinstance(task_backends[alias], RelayBackend):
        raise ConfigurationError(
            f'RELAY["ACTS_BACKEND"] is {alias!r}, which is no alias of TASKS that Relay backs.'
        )
    admitted = list(settings.TASKS[alias].get("QUEUES", [DEFAULT_TASK_QUEUE_NAME]))
    queue = conf.get().acts_queue or _first_queue(admitted)
    if admitted and queue not in admitted:
        raise ConfigurationError(
            f'RELAY["ACTS_QUEUE"] is {queue!r}, which TASKS[{alias!r}] does not admit; '
            f"its QUEUES are {', '.join(admitted)}."
        )
    return alias, queue


def _first_alias() -> str:
    for alias in settings.TASKS:
        if isinstance(task_backends[alias], RelayBackend):
            return str(alias)
    raise ConfigurationError("No alias of TASKS is backed by Relay, so nobody would do bulk acts.")


def _first_queue(admitted: list[str]) -> str:
    known = admitted or list(conf.get().queues or [DEFAULT_TASK_QUEUE_NAME])
    return DEFAULT_TASK_QUEUE_NAME if DEFAULT_TASK_QUEUE_NAME in known else known[0]


_backend, _queue = destination()


@task(takes_context=True, backend=_backend, queue_name=_queue)
def run_bulk_act(context: RelayContext, bulk_id: int) -> dict[str, int]:
    """Continue a bulk act at its position, and return how many jobs were changed and skipped."""
    turn_ends = time.monotonic() + TURN_SECONDS
    bulk = _read(bulk_id)
    if bulk.finished_at is None:
        try:
            run = _Run(bulk)
            while run.next_batch():
                context.raise_if_cancelled()
                if time.monotonic() >= turn_ends:
                    raise Snooze(0)
        except (matching.Stopped, InvalidJob, QueueFull) as why:
            _finish(bulk, str(why))
    bulk = _read(bulk_id)
    return {"changed": bulk.changed, "skipped": bulk.skipped}


class _Run:
    """One attempt at a bulk act: the rows that match are read again for each batch."""

    def __init__(self, bulk: BulkAct) -> None:
        """Raise `Stopped` if this release has no such action."""
        self.bulk = bulk
        self.action = _action(bulk)

    def next_batch(self) -> bool:
        """Perform the action on the next batch; False if none is left or the act was ended by hand.

        Raises `Stopped` if the action is not allowed any more.
        """
        bulk = self.bulk = _read(self.bulk.pk)
        if bulk.finished_at is not None:
            return False
        # The operator and their permissions may have changed since the last batch.
        rows = matching.rows_of(bulk, self.action)
        ids = list(matching.targets(rows, self.action, bulk.upper_id, bulk.position)[:BATCH])
        if not ids:
            _finish(bulk, "")
            return False
        given = {} if bulk.priority is None else {"priority": bulk.priority}
        with store.transaction() as tx:
            # First: another attempt of this job may be at the same batch, and only one may take it.
            if store.take_bulk_turn(tx, bulk.pk, bulk.position, ids[-1]):
                done = self.action.verb(tx, ids, given)
                if done.left:  # it had no room for the leases of these: they are the next batch
                    store.take_bulk_turn(tx, bulk.pk, ids[-1], done.left[0] - 1)
                    ids = [job_id for job_id in ids if job_id < done.left[0]]
                skipped = len(ids) - len(done.changed)
                store.count_bulk(tx, bulk.pk, changed=len(done.changed), skipped=skipped)
        return True


def _read(bulk_id: int) -> BulkAct:
    try:
        return BulkAct.objects.using(conf.get().database).get(pk=bulk_id)
    except BulkAct.DoesNotExist:
        raise Fatal(f"there is no bulk act {bulk_id}") from None


def _action(bulk: BulkAct) -> JobAction:
    action = job_action(bulk.act)
    if action is None:
        raise matching.Stopped(f"there is no act {bulk.act!r}")
    return action


def _finish(bulk: BulkAct, stop_reason: str) -> None:
    """End the bulk act, and write that into the log of the operator who asked for it."""
    user = get_user_model()._default_manager.filter(pk=bulk.user_id).first()
    with store.transaction() as tx:
        bulk = _read(bulk.pk)
        if store.finish_bulk(tx, bulk.pk, stop_reason) and user is not None:
            numbers = {"changed": bulk.changed, "skipped": bulk.skipped}
            progress = "stopped" if stop_reason else "finished"
            matching.record_progress(user.pk, bulk, progress, numbers)
