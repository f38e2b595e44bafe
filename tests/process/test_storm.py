"""Many writers on one file: nobody is locked out, and no job is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from django.contrib.auth.models import Group

from relay_queue.models import Job, Lease
from tests.conftest import wait_until
from tests.process.farm import Farm

PRODUCERS = 16
JOBS_EACH = 125

# They are forked before anything is open: to import Django sixteen times would take longer than
# the storm does. Each child is a producer with connections of its own.
ENQUEUE = """
import os, sys
from tests.process import chores
pids = []
while len(pids) < int(sys.argv[4]) and (pid := os.fork()):
    pids.append(pid)
if pid:
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
print("set", flush=True)
chores.wait_for(sys.argv[2])
for _ in range(int(sys.argv[3])):
    chores.note.enqueue(sys.argv[1])
"""

WRITE_OWN_TABLE = """
import os, sys
from django.contrib.auth.models import Group
from tests.process import chores
print("set", flush=True)
chores.wait_for(sys.argv[1])
count = 0
while not os.path.exists(sys.argv[2]):
    Group.objects.create(name=f"storm {count}")
    count += 1
print("wrote", count, flush=True)
"""


@pytest.mark.thorough
def test_two_thousand_enqueues_beside_workers_and_another_writer(farm: Farm) -> None:
    farm.relay["SHUTDOWN_TIMEOUT_SECONDS"] = 30
    numbers = (str(JOBS_EACH), str(PRODUCERS))
    producers = farm.spawn_python(ENQUEUE, farm.effects, farm.file("start"), *numbers)
    other = farm.spawn_python(WRITE_OWN_TABLE, farm.file("start"), farm.file("end"))
    workers = farm.work(processes=4, concurrency=4)
    wait_until(lambda: farm.log(producers).count("set") == PRODUCERS, message=farm.everything)
    wait_until(lambda: "set" in farm.log(other), message=farm.everything)
    farm.make("start")
    assert producers.wait(90) == 0, farm.everything()
    farm.wait_finished()
    farm.make("end")
    assert other.wait(60) == 0
    assert farm.stop(workers) == 0
    assert "locked" not in farm.everything()
    # Nothing was killed, so each job has one attempt, and each attempt one line.
    assert Job.objects.count() == PRODUCERS * JOBS_EACH
    assert set(Job.objects.values_list("state", "attempt")) == {("succeeded", 1)}
    epochs = Counter(run.epoch for run in farm.runs())
    assert epochs == Counter(Lease.objects.filter(outcome="acked").values_list("id", flat=True))
    written = int(farm.log(other).split("wrote")[1])
    assert written == Group.objects.count() > 0
    assert len({run.pid for run in farm.runs()}) == 4, "every worker had a share"
    assert farm.manage("relay", "verify", check=False).returncode == 0
