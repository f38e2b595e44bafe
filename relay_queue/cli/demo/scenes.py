"""The scenes of the demo. Each does something to Relay and checks what came of it.

A scene says nothing that it has not read from the tables or from the journal of the functions.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Final

from django.db import transaction

from relay_queue import conf, store
from relay_queue.cli.demo import tasks
from relay_queue.cli.demo.stage import CONCURRENCY, PROCESSES, Stage, ledger, moment, relay
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job, Lease
from relay_queue.ranking import Priority
from relay_queue.scratch import journal, workers
from relay_queue.states import Outcome, State

JOBS: Final = 120
SHORT_LEASE_SECONDS: Final = 3.0
EXPORT_SECONDS: Final = 1.5
# "Within about a second", with room for a machine that is busy with other things.
MOST_RECOVERY_MS: Final = 5_000
CAPACITY: Final = 3


def run_jobs(stage: Stage) -> None:
    """Jobs of several queues and priorities on real worker processes."""
    stage.workers.start()
    stage.wait(lambda: len(workers.alive()) == PROCESSES, "all workers to be ready")
    stage.screen.note(
        f"runworker started {PROCESSES} processes with {CONCURRENCY} slots each: "
        + ", ".join(f"{worker.name} is {worker.pid}" for worker in workers.alive())
    )
    began = time.monotonic()
    queues, classes = list(conf.get().queues or ()), list(Priority)
    with transaction.atomic():
        job_ids = [
            int(
                tasks.send_mail.using(
                    # Each queue gets all classes, the lowest first: order of arrival is not enough.
                    queue_name=queues[n % len(queues)],
                    priority=classes[n // len(queues) % len(classes)],
                )
                .enqueue(f"reader-{n}@example.org")
                .id
            )
            for n in range(JOBS)
        ]
    stage.wait_for_state(job_ids, State.SUCCEEDED)
    seconds = time.monotonic() - began
    leases = list(Lease.objects.filter(job__in=job_ids).select_related("job").order_by("pk"))
    shares = sorted(Counter(lease.worker_id for lease in leases).values(), reverse=True)
    stage.check(
        len(leases) == JOBS and len(shares) == PROCESSES,
        f"{JOBS} jobs of {len(queues)} queues done in {seconds:.1f} s, each once; the workers "
        f"did {_listed(shares)} of them",
        shares,
    )
    claimed = {queue: [x.job for x in leases if x.job.queue == queue] for queue in queues}
    stage.check(
        all(jobs == sorted(jobs, key=_place) for jobs in claimed.values()),
        "in every queue urgent went first, then high, normal and low, each first in, first out",
        {queue: [job.pk for job in jobs] for queue, jobs in claimed.items()},
    )


def retry(stage: Stage) -> None:
    """Jobs that fail and are tried again with back-off."""
    failures = [1, 2, 3]
    job_ids = [int(tasks.call_partner.enqueue(failures=n).id) for n in failures]
    for n, job_id in zip(failures, job_ids, strict=True):
        (job,) = stage.wait_for_state([job_id], State.SUCCEEDED)
        leases = ledger(job.pk)
        outcomes = [lease.outcome for lease in leases]
        waits = [_seconds_between(a, b) for a, b in pairwise(leases)]
        wanted = [job.backoff_base_seconds * 2**k for k in range(n)]
        stage.check(
            outcomes == [Outcome.FAILED] * n + [Outcome.ACKED]
            and all(waited >= least for waited, least in zip(waits, wanted, strict=True)),
            f"job {job.pk} failed {_times(n)}, waited "
            + ", ".join(f"{waited:.2f} s" for waited in waits)
            + f", then succeeded in attempt {job.attempt}",
            (outcomes, waits),
        )


def dead_letters(stage: Stage) -> None:
    """Jobs that no retry can help, and one that an operator gives another chance."""
    boxes = ["north", "south", "west"]
    fatal = [int(tasks.deliver.enqueue(box).id) for box in boxes]
    hopeless = tasks.call_partner.using(max_attempts=2).enqueue(failures=99)
    *letters, exhausted = stage.wait_for_state([*fatal, int(hopeless.id)], State.DEAD)
    stage.check(
        all([x.outcome for x in ledger(job.pk)] == [Outcome.FATAL] for job in letters),
        f"jobs {_listed([job.pk for job in letters])} are dead letters after one attempt: "
        f"{letters[0].last_error}",
    )
    attempts = ledger(exhausted.pk)
    stage.check(
        [x.outcome for x in attempts] == [Outcome.FAILED] * 2 and bool(attempts[-1].traceback),
        f"job {exhausted.pk} is one after 2 of 2 attempts; each has its traceback in the ledger",
    )
    (stage.directory / boxes[0]).touch()
    relay("requeue", str(fatal[0]))
    (job,) = stage.wait_for_state(fatal[:1], State.SUCCEEDED)
    stage.check(
        [x.outcome for x in ledger(job.pk)] == [Outcome.FATAL, Outcome.ACKED],
        f"the mailbox was made, `relay requeue {job.pk}` said: the job has succeeded",
    )


def kill(stage: Stage) -> None:
    """A worker is killed in mid-job."""
    job_id = int(tasks.export.enqueue(seconds=1.0).id)
    first, lease = stage.wait_for_run(job_id)
    killed_at = time.monotonic()
    os.kill(first.pid, signal.SIGKILL)
    stage.screen.note(f"job {job_id} runs in process {first.pid}")
    stage.screen.note(f"$ kill -9 {first.pid}")
    second, _ = stage.wait_for_run(job_id, attempt=2)
    milliseconds = (second.at - killed_at) * 1000
    stage.check(
        second.pid != first.pid and milliseconds <= MOST_RECOVERY_MS,
        f"running again in process {second.pid} {milliseconds:,.0f} ms after the kill, "
        f"though its lease had {lease.job.lease_seconds:g} s to go",
        (second, milliseconds),
    )
    stage.wait_for_state([job_id], State.SUCCEEDED)
    outcomes = [lease.outcome for lease in ledger(job_id)]
    stage.check(
        outcomes == [Outcome.LOST, Outcome.ACKED],
        "the ledger says: attempt 1 lost, effect unknown; attempt 2 acked",
        outcomes,
    )
    alive = stage.wait(
        lambda: [w for w in workers.alive() if w.pid != first.pid][PROCESSES - 1 :],
        "a new worker in place of the killed one",
    )
    stage.check(True, f"the supervisor has put process {alive[-1].pid} in its place")


def stop(stage: Stage) -> None:
    """A worker is stopped for longer than its lease, and comes back too late."""
    job_id = int(
        tasks.export.using(lease_seconds=SHORT_LEASE_SECONDS).enqueue(seconds=EXPORT_SECONDS).id
    )
    first, lease = stage.wait_for_run(job_id)
    stage.freeze(first.pid)
    stage.screen.note(
        f"job {job_id} runs in process {first.pid}, which renews its lease of "
        f"{SHORT_LEASE_SECONDS:g} s"
    )
    stage.screen.note(f"$ kill -STOP {first.pid}")
    second, _ = stage.wait_for_run(job_id, attempt=2)
    stage.check(
        second.pid != first.pid and second.epoch > first.epoch,
        f"the lease expired and process {second.pid} has the job, with a later token",
    )
    (job,) = stage.wait_for_state([job_id], State.SUCCEEDED)
    os.kill(first.pid, signal.SIGCONT)
    stage.screen.note(f"$ kill -CONT {first.pid}")
    late = stage.wait(lambda: _refused(lease.pk), "the late ack to be refused")
    stage.check(
        late.outcome == Outcome.EXPIRED and late.refused_verb == "ack",
        f"the first owner came back at {moment(late.refused_at)} with an {late.refused_verb}: "
        f"refused, {late.refused_reason}",
        (late.outcome, late.refused_verb),
    )
    job.refresh_from_db()
    stage.check(
        job.state == State.SUCCEEDED and job.result == str(second.epoch),
        f"the job keeps the result of attempt {second.attempt}",
        job.result,
    )


def cancel(stage: Stage) -> None:
    """A running job is cancelled."""
    job_id = int(tasks.crawl.enqueue().id)
    _, lease = stage.wait_for_run(job_id)
    relay("cancel", str(job_id))
    cancelled_at = time.monotonic()
    job = Job.objects.get(pk=job_id)
    stage.check(
        job.state == State.CANCELLED and bool(job.finished_at),
        f"`relay cancel {job_id}` said: the job is cancelled at once, durably",
        job.state,
    )
    told = stage.wait(
        lambda: journal.read(stage.directory, "told to stop", job_id), "the function to be told"
    )[0]
    milliseconds = max((told.at - cancelled_at) * 1000, 0)
    stage.check(True, f"its function saw context.cancelled {milliseconds:,.0f} ms later")
    late = stage.wait(lambda: _refused(lease.pk), "the late result to be refused")
    job.refresh_from_db()
    stage.check(
        job.state == State.CANCELLED and job.result is None,
        f"what it then returned was refused: {late.refused_reason}",
        (job.state, job.result),
    )


def refuse(stage: Stage) -> None:
    """What an enqueue protects from: doing it twice, and more than there is room for."""
    call = tasks.send_mail.using(queue_name="mail", idempotency_key="invoice-2041")
    job_ids = {int(call.enqueue("customer@example.org").id) for _ in range(2)}
    rows = Job.objects.filter(idempotency_key="invoice-2041").count()
    stage.check(
        len(job_ids) == 1 and rows == 1,
        f"the key invoice-2041 was enqueued twice and made one job: {min(job_ids)}",
        job_ids,
    )
    relay("pause", "media")
    with store.transaction() as tx:
        store.set_limits(tx, "media", capacity=CAPACITY, max_running=None)
    call = tasks.send_mail.using(queue_name="media")
    job_ids |= {int(call.enqueue(f"{n}@example.org").id) for n in range(CAPACITY)}
    message = ""
    try:
        call.enqueue("one-too-many@example.org")
    except QueueFull as full:
        message = str(full)
    stage.check(
        bool(message) and Job.objects.filter(queue="media", state=State.READY).count() == CAPACITY,
        f"QueueFull: {message}",
        "no QueueFull",
    )
    relay("resume", "media")
    stage.wait_for_state(sorted(job_ids), State.SUCCEEDED)
    stage.check(True, "the queue was paused and is resumed: all of them have succeeded")


def end(stage: Stage) -> None:
    """The workers are told to stop, and the books are compared."""
    stage.workers.tell_to_stop()
    code = stage.workers.wait()
    stage.check(code == 0, "TERM: the workers finished what they held and left with code 0", code)
    stage.check(not workers.alive(), "none is registered as alive any more")
    left = Job.objects.exclude(state__in=[State.SUCCEEDED, State.DEAD, State.CANCELLED])
    total = Job.objects.count()
    stage.check(
        not left.exists(), f"each of {total} jobs has reached exactly one end", left.values("pk")
    )
    noted = {(run.epoch, run.job_id, run.pid) for run in journal.read(stage.directory)}
    leased = set(Lease.objects.values_list("pk", "job", "worker__pid"))
    stage.check(
        noted == leased,
        f"what the functions wrote down agrees with the ledger: {len(noted)} runs under "
        f"{len(leased)} leases",
        noted ^ leased,
    )


SCENES: Final[tuple[tuple[str, Callable[[Stage], None]], ...]] = (
    (f"{JOBS} jobs of four queues and four priorities", run_jobs),
    ("Some fail and are tried again", retry),
    ("Some cannot succeed and become dead letters", dead_letters),
    ("A worker is killed in mid-job", kill),
    ("A worker is stopped for longer than its lease", stop),
    ("A running job is cancelled", cancel),
    ("Enqueued twice, and into a full queue", refuse),
    ("The workers are told to stop", end),
)
"""What is shown, in this order."""


def _place(job: Job) -> tuple[int, int]:
    return (-job.priority, job.pk)


def _refused(lease_id: int) -> Lease | None:
    return Lease.objects.filter(pk=lease_id, refused_at__isnull=False).first()


def _seconds_between(earlier: Lease, later: Lease) -> float:
    waited: timedelta = later.acquired_at - (earlier.ended_at or later.acquired_at)
    return waited.total_seconds()


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


def _listed(values: list[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last
