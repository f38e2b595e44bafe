"""The row of a running worker: what it says, and what becomes of the worker without it."""

from __future__ import annotations

import relay_queue
from relay_queue.models import Worker
from tests.conftest import wait_until
from tests.process import chores
from tests.process.farm import Farm, on_each_engine

pytestmark = on_each_engine


def test_a_worker_whose_row_is_deleted_is_registered_again_and_goes_on(farm: Farm) -> None:
    workers = farm.work()
    before = Worker.objects.get()
    assert before.version == relay_queue.__version__
    Worker.objects.all().delete()
    wait_until(lambda: Worker.objects.exists(), message=lambda: farm.log(workers))
    after = Worker.objects.get()
    kept = ("id", "incarnation", "pid", "lock_inode", "session_lock", "version")
    assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
    farm.wait_logged(workers, "was deleted; registering again")
    assert "alive, heartbeat" in farm.manage("relay", "doctor", check=False).stdout
    farm.wait_state(farm.enqueue(chores.note), "succeeded")
