"""A bulk act of the console, done by real workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User

from relay_queue import store
from relay_queue.admin.actions import jobs, matching
from relay_queue.compat import task_backends
from relay_queue.models import BulkAct, Job
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm

COUNT = 6_000


@pytest.fixture
def operator(farm: Farm) -> Iterator[User]:
    """Return somebody who may do everything, and remove them with their log."""
    user = User.objects.create_superuser("operator")
    yield user
    user.delete()


def test_bulk_act_survives_the_death_of_its_worker_and_counts_each_job_once(
    farm: Farm, operator: User
) -> None:
    call = chores.nothing.using(queue_name="held").bind()
    results = task_backends["default"].enqueue_many([call] * COUNT)  # type: ignore[attr-defined]
    newest = max(int(result.id) for result in results)
    farm.do(store.pause, "held")
    new = store.NewBulkAct(
        nonce="once",
        act="prioritise",
        priority=7,
        listing="relay_queue.job",
        filters="queue=held",
        time_zone="UTC",
        language="en-us",
        upper_id=newest,
        matched=COUNT,
        user_id=str(operator.pk),
        username="operator",
        site="admin",
    )
    bulk_id, _ = jobs.start(new, operator.pk)
    later = farm.enqueue(chores.note, queue_name="held")
    assert later > newest >= matching.newest_id() - 2
    farm.work()

    def bulk() -> BulkAct:
        return BulkAct.objects.get(pk=bulk_id)

    wait_until(lambda: bulk().changed > 0, message=farm.everything)
    os.kill(farm.worker(), signal.SIGKILL)
    wait_until(lambda: bulk().finished_at is not None, message=farm.everything)
    done = bulk()
    assert (done.changed, done.skipped, done.stop_reason) == (COUNT, 0, "")
    assert Job.objects.filter(queue="held", priority=7).count() == COUNT
    assert farm.job(later).priority == 0
    said = [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]
    assert said == [
        "Changed progress to begun (prioritise).",
        "Changed progress to finished (prioritise).",
    ]
