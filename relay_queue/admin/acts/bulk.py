"""The job that does a bulk act, batch by batch.

Imported when the first bulk act is asked for, and by the worker that runs it: the alias and the
queue of the task are read from the settings then.
"""

from __future__ import annotations

import time
from typing import Final

from django.contrib.auth import get_user_model

from relay_queue import conf, store
from relay_queue.admin.acts import audit, matching
from relay_queue.admin.acts.catalogue import JobAct, job_act
from relay_queue.admin.acts.destination import destination
from relay_queue.admin.acts.doing import BATCH
from relay_queue.context import RelayContext
from relay_queue.exceptions import Fatal, InvalidJob, QueueFull, Snooze
from relay_queue.models import BulkAct
from relay_queue.task import task

TURN_SECONDS: Final = 20.0
"""How long one attempt works before it makes room for others. Snoozing is not charged."""

_backend, _queue = destination()


@task(takes_context=True, backend=_backend, queue_name=_queue)
def run_bulk_act(context: RelayContext, bulk_id: int) -> dict[str, int]:
    """Go on with a bulk act where it has got to, and return what was done to how many."""
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
    """One attempt at a bulk act: the rows that match, read anew for each batch."""

    def __init__(self, bulk: BulkAct) -> None:
        """Raises `Stopped` if there is no such act any more."""
        self.bulk = bulk
        self.act = _act(bulk)

    def next_batch(self) -> bool:
        """Do the next batch; False if there is none, or somebody has ended the act.

        Raises `Stopped` if it is not allowed any more.
        """
        bulk = self.bulk = _read(self.bulk.pk)
        if bulk.finished_at is not None:
            return False
        # Who wants it, and what they may, may have changed since the last batch.
        rows = matching.rows_of(bulk, self.act)
        ids = list(matching.targets(rows, self.act, bulk.upper_id, bulk.position)[:BATCH])
        if not ids:
            _finish(bulk, "")
            return False
        given = {} if bulk.priority is None else {"priority": bulk.priority}
        with store.transaction() as tx:
            # First, since a second run of this very job may be here as well.
            if store.take_bulk_turn(tx, bulk.pk, bulk.position, ids[-1]):
                done = self.act.verb(tx, ids, given)
                skipped = len(ids) - len(done.changed)
                store.count_bulk(tx, bulk.pk, changed=len(done.changed), skipped=skipped)
        return True


def _read(bulk_id: int) -> BulkAct:
    try:
        return BulkAct.objects.using(conf.get().database).get(pk=bulk_id)
    except BulkAct.DoesNotExist:
        raise Fatal(f"there is no bulk act {bulk_id}") from None


def _act(bulk: BulkAct) -> JobAct:
    act = job_act(bulk.act)
    if act is None:
        raise matching.Stopped(f"there is no act {bulk.act!r}")
    return act


def _finish(bulk: BulkAct, stop_reason: str) -> None:
    """End the act, and write so into the log of whoever asked for it."""
    user = get_user_model()._default_manager.filter(pk=bulk.user_id).first()
    with store.transaction() as tx:
        bulk = _read(bulk.pk)
        if store.finish_bulk(tx, bulk.pk, stop_reason) and user is not None:
            numbers = {"changed": bulk.changed, "skipped": bulk.skipped}
            change = f"progress to {'stopped' if stop_reason else 'finished'}"
            audit.record(user.pk, BulkAct, [(bulk.pk, str(bulk), change)], bulk.act, numbers)
