"""The demo: a script over a scratch project. Each scene does something to Relay and checks it.

A scene says nothing that it has not read from the tables or from the journal of the functions.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Final

from django.core.management import call_command
from django.db import transaction

from relay_queue import __version__, clock, store
from relay_queue.backoff import Backoff
from relay_queue.cli.base import INTERRUPTED
from relay_queue.cli.output import Output
from relay_queue.exceptions import QueueFull
from relay_queue.lab import tasks
from relay_queue.lab.processes import STOPPING, LabError
from relay_queue.lab.project import TOLD, Entry, ScratchProject, Workers, alive, counts
from relay_queue.lab.screen import Screen, moment, show_summary
from relay_queue.models import Job, Lease
from relay_queue.ranking import Priority
from relay_queue.states import Outcome, State

MOST_SECONDS: Final = 110.0
"""When a demo that does not get on gives up: less than the two minutes that were promised."""

QUEUES: Final = ("default", "mail", "reports", "media")
PROCESSES: Final = 3
CONCURRENCY: Final = 2
JOBS: Final = 120
SHORT_LEASE_SECONDS: Final = 3.0
EXPORT_SECONDS: Final = 1.5
MOST_RECOVERY_MS: Final = 5_000
"""Within about a second, with room for a machine that is busy with other things."""

CAPACITY: Final = 3
PARTNER_BACKOFF: Final = Backoff(0.4, 5.0)


def run(directory: Path, *, color: bool) -> int:
    """Play everything in the scratch project of this process, and leave nothing running.

    Returns 0, 1 if a promise was not kept, or 130 after an interruption.
    """
    out = Output(sys.stdout, sys.stderr, color=color)
    began = time.monotonic()
    with Screen(out, color=color) as screen:
        demo = Demo(directory, screen)
        before = [signal.signal(number, demo.interrupt) for number in STOPPING]
        try:
            demo.play()
        except LabError as missing:
            demo.complain(missing)
            return 1
        except KeyboardInterrupt:
            screen.say()
            screen.say("Interrupted: stopping the workers.", "warning")
            return INTERRUPTED
        finally:
            demo.close()
            for number, handler in zip(STOPPING, before, strict=True):
                signal.signal(number, handler)
    verified = demo.run("relay", "verify")
    return show_summary(out, verified, time.monotonic() - began)


class Demo(ScratchProject):
    """The scratch project of a demo, with its workers and its screen."""

    def __init__(self, directory: Path, screen: Screen) -> None:
        super().__init__(directory, most_seconds=MOST_SECONDS)
        self.screen = screen
        self.workers: Workers | None = None
        self._interrupted = False

    def interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Note a signal to stop, which the next `check` or wait heeds.

        Raised on the spot, it could break into the midst of a transaction. There may be several.
        """
        self._interrupted = True

    def play(self) -> None:
        """Play the scenes."""
        screen = self.screen
        screen.say(f"Relay {__version__} at work, {clock.now():%Y-%m-%d %H:%M:%S} UTC", "title")
        screen.say("On a scratch database; the project's own is not touched.")
        screen.doing("making the scratch database")
        self.migrate()
        for number, (title, scene) in enumerate(SCENES, start=1):
            screen.scene(number, len(SCENES), title)
            scene(self)

    def check(self, held: bool, claim: str, found: object = "") -> None:
        """Show a claim that held. Raises `LabError` with what was ``found`` if it did not."""
        self._leave_if_told()
        if not held:
            raise LabError(f"{claim}. Found: {found}" if found != "" else claim)
        self.screen.fact(claim)

    def complain(self, missing: LabError) -> None:
        """Show what was not observed, and how to find out why."""
        screen = self.screen
        screen.say()
        screen.say(f"NOT OBSERVED: {missing}", "bad")
        screen.say("The end of the workers' log:")
        for line in self.last_words():
            screen.say(f"  {line}", "dim")
        screen.say("Run it again with --keep to look at the scratch database afterwards.")

    def wait_lease(self, job_id: int, attempt: int = 1) -> tuple[Entry, Lease]:
        """Wait until a function has entered an attempt; return what it noted, and its lease."""
        entry = self.wait_run(job_id, attempt)
        lease = Lease.objects.select_related("worker", "job").get(pk=entry.epoch)
        if lease.worker is None or lease.worker.pid != entry.pid:
            raise LabError(f"job {job_id} ran in process {entry.pid}, not in {lease.worker}")
        return entry, lease

    def heed(self) -> None:
        """Heed an interruption and the end of the workers, and draw how far the jobs are."""
        self._leave_if_told()
        if self.workers is not None:
            self.workers.require_running()
        self.screen.pulse(counts)

    def _leave_if_told(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt


def relay(*arguments: str) -> None:
    """Run a verb of ``manage.py relay``."""
    printed = StringIO()
    call_command("relay", *arguments, stdout=printed, stderr=printed)


# -- the scenes


def run_jobs(demo: Demo) -> None:
    """Jobs of several queues and priorities on real worker processes."""
    demo.workers = demo.work(
        "--name=demo", "--shutdown-timeout=5", processes=PROCESSES, concurrency=CONCURRENCY
    )
    demo.screen.note(
        f"runworker started {PROCESSES} processes with {CONCURRENCY} slots each: "
        + ", ".join(f"{worker.name} is {worker.pid}" for worker in alive())
    )
    began = time.monotonic()
    classes = list(Priority)
    with transaction.atomic():
        job_ids = [
            int(
                tasks.send_mail.using(
                    # Each queue gets all classes, the lowest first: order of arrival is not enough.
                    queue_name=QUEUES[n % len(QUEUES)],
                    priority=classes[n // len(QUEUES) % len(classes)],
                )
                .enqueue(f"reader-{n}@example.org")
                .id
            )
            for n in range(JOBS)
        ]
    demo.wait_states(job_ids, State.SUCCEEDED)
    seconds = time.monotonic() - began
    leases = list(Lease.objects.filter(job__in=job_ids).select_related("job").order_by("pk"))
    shares = sorted(Counter(lease.worker_id for lease in leases).values(), reverse=True)
    demo.check(
        len(leases) == JOBS and len(shares) == PROCESSES,
        f"{JOBS} jobs of {len(QUEUES)} queues done in {seconds:.1f} s, each once; the workers "
        f"did {_listed(shares)} of them",
        shares,
    )
    claimed = {queue: [x.job for x in leases if x.job.queue == queue] for queue in QUEUES}
    demo.check(
        all(jobs == sorted(jobs, key=_place) for jobs in claimed.values()),
        "in every queue urgent went first, then high, normal and low, each first in, first out",
        {queue: [job.pk for job in jobs] for queue, jobs in claimed.items()},
    )


def retry(demo: Demo) -> None:
    """Jobs that fail and are tried again with back-off."""
    failures = [1, 2, 3]
    job_ids = [
        demo.enqueue(tasks.fail, n, max_attempts=4, backoff=PARTNER_BACKOFF) for n in failures
    ]
    for n, job_id in zip(failures, job_ids, strict=True):
        job = demo.wait_state(job_id, State.SUCCEEDED)
        leases = demo.ledger(job.pk)
        outcomes = [lease.outcome for lease in leases]
        waits = [_seconds_between(a, b) for a, b in pairwise(leases)]
        wanted = [job.backoff_base_seconds * 2**k for k in range(n)]
        demo.check(
            outcomes == [Outcome.FAILED] * n + [Outcome.ACKED]
            and all(waited >= least for waited, least in zip(waits, wanted, strict=True)),
            f"job {job.pk} failed {_times(n)}, waited "
            + ", ".join(f"{waited:.2f} s" for waited in waits)
            + f", then succeeded in attempt {job.attempt}",
            (outcomes, waits),
        )


def dead_letters(demo: Demo) -> None:
    """Jobs that no retry can help, and one that an operator gives another chance."""
    boxes = ["north", "south", "west"]
    fatal = [demo.enqueue(tasks.deliver, box) for box in boxes]
    hopeless = demo.enqueue(tasks.fail, 99, max_attempts=2, backoff=PARTNER_BACKOFF)
    *letters, exhausted = demo.wait_states([*fatal, hopeless], State.DEAD)
    demo.check(
        all([x.outcome for x in demo.ledger(job.pk)] == [Outcome.FATAL] for job in letters),
        f"jobs {_listed([job.pk for job in letters])} are dead letters after one attempt: "
        f"{letters[0].last_error}",
    )
    attempts = demo.ledger(exhausted.pk)
    demo.check(
        [x.outcome for x in attempts] == [Outcome.FAILED] * 2 and bool(attempts[-1].traceback),
        f"job {exhausted.pk} is one after 2 of 2 attempts; each has its traceback in the ledger",
    )
    demo.make(boxes[0])
    relay("requeue", str(fatal[0]))
    (job,) = demo.wait_states(fatal[:1], State.SUCCEEDED)
    demo.check(
        [x.outcome for x in demo.ledger(job.pk)] == [Outcome.FATAL, Outcome.ACKED],
        f"the mailbox was made, `relay requeue {job.pk}` said: the job has succeeded",
    )


def kill(demo: Demo) -> None:
    """A worker is killed in mid-job."""
    job_id = demo.enqueue(tasks.export, 1.0)
    first, lease = demo.wait_lease(job_id)
    killed_at = time.monotonic()
    os.kill(first.pid, signal.SIGKILL)
    demo.screen.note(f"job {job_id} runs in process {first.pid}")
    demo.screen.note(f"$ kill -9 {first.pid}")
    second, _ = demo.wait_lease(job_id, attempt=2)
    milliseconds = (second.at - killed_at) * 1000
    demo.check(
        second.pid != first.pid and milliseconds <= MOST_RECOVERY_MS,
        f"running again in process {second.pid} {milliseconds:,.0f} ms after the kill, "
        f"though its lease had {lease.job.lease_seconds:g} s to go",
        (second, milliseconds),
    )
    demo.wait_state(job_id, State.SUCCEEDED)
    outcomes = [lease.outcome for lease in demo.ledger(job_id)]
    demo.check(
        outcomes == [Outcome.LOST, Outcome.ACKED],
        "the ledger says: attempt 1 lost, effect unknown; attempt 2 acked",
        outcomes,
    )
    new = demo.wait(
        "a new worker in place of the killed one",
        lambda: [pid for pid in demo.pids() if pid != first.pid][PROCESSES - 1 :],
    )
    demo.check(True, f"the supervisor has put process {new[-1]} in its place")


def stop(demo: Demo) -> None:
    """A worker is stopped for longer than its lease, and comes back too late."""
    job_id = demo.enqueue(tasks.export, EXPORT_SECONDS, lease_seconds=SHORT_LEASE_SECONDS)
    first, _ = demo.wait_lease(job_id)
    with demo.stopped(first.pid):
        demo.screen.note(
            f"job {job_id} runs in process {first.pid}, which renews its lease of "
            f"{SHORT_LEASE_SECONDS:g} s"
        )
        demo.screen.note(f"$ kill -STOP {first.pid}")
        second, _ = demo.wait_lease(job_id, attempt=2)
        demo.check(
            second.pid != first.pid and second.epoch > first.epoch,
            f"the lease expired and process {second.pid} has the job, with a later token",
        )
        job = demo.wait_state(job_id, State.SUCCEEDED)
    demo.screen.note(f"$ kill -CONT {first.pid}")
    late = demo.wait_refused(job_id)
    demo.check(
        late.outcome == Outcome.EXPIRED and late.refused_verb == "ack",
        f"the first owner came back at {moment(late.refused_at)} with an {late.refused_verb}: "
        f"refused, {late.refused_reason}",
        (late.outcome, late.refused_verb),
    )
    job.refresh_from_db()
    demo.check(
        job.state == State.SUCCEEDED and job.result == str(second.epoch),
        f"the job keeps the result of attempt {second.attempt}",
        job.result,
    )


def cancel(demo: Demo) -> None:
    """A running job is cancelled."""
    job_id = demo.enqueue(tasks.wait_politely, queue_name="reports")
    demo.wait_run(job_id)
    relay("cancel", str(job_id))
    cancelled_at = time.monotonic()
    job = Job.objects.get(pk=job_id)
    demo.check(
        job.state == State.CANCELLED and bool(job.finished_at),
        f"`relay cancel {job_id}` said: the job is cancelled at once, durably",
        job.state,
    )
    told = demo.wait_run(job_id, event=TOLD)
    milliseconds = max((told.at - cancelled_at) * 1000, 0)
    demo.check(True, f"its function saw context.cancelled {milliseconds:,.0f} ms later")
    late = demo.wait_refused(job_id)
    job.refresh_from_db()
    demo.check(
        job.state == State.CANCELLED and job.result is None,
        f"what it then returned was refused: {late.refused_reason}",
        (job.state, job.result),
    )


def refuse(demo: Demo) -> None:
    """What an enqueue protects from: doing it twice, and more than there is room for."""
    call = tasks.send_mail.using(queue_name="mail", idempotency_key="invoice-2041")
    job_ids = {int(call.enqueue("customer@example.org").id) for _ in range(2)}
    rows = Job.objects.filter(idempotency_key="invoice-2041").count()
    demo.check(
        len(job_ids) == 1 and rows == 1,
        f"the key invoice-2041 was enqueued twice and made one job: {min(job_ids)}",
        job_ids,
    )
    relay("pause", "media")
    demo.do(store.set_limits, "media", capacity=CAPACITY, max_running=None)
    call = tasks.send_mail.using(queue_name="media")
    job_ids |= {int(call.enqueue(f"{n}@example.org").id) for n in range(CAPACITY)}
    message = ""
    try:
        call.enqueue("one-too-many@example.org")
    except QueueFull as full:
        message = str(full)
    demo.check(
        bool(message) and Job.objects.filter(queue="media", state=State.READY).count() == CAPACITY,
        f"QueueFull: {message}",
        "no QueueFull",
    )
    relay("resume", "media")
    demo.wait_states(sorted(job_ids), State.SUCCEEDED)
    demo.check(True, "the queue was paused and is resumed: all of them have succeeded")


def end(demo: Demo) -> None:
    """The workers are told to stop, and the ledger is compared with the journal."""
    assert demo.workers is not None
    demo.workers.tell_to_stop()
    code = demo.workers.wait()
    demo.check(code == 0, "TERM: the workers finished what they held and left with code 0", code)
    demo.check(not alive(), "none is registered as alive any more")
    left = Job.objects.exclude(state__in=[State.SUCCEEDED, State.DEAD, State.CANCELLED])
    total = Job.objects.count()
    demo.check(
        not left.exists(), f"each of {total} jobs has reached exactly one end", left.values("pk")
    )
    noted = {(run.epoch, run.job_id, run.pid) for run in demo.runs()}
    leased = set(Lease.objects.values_list("pk", "job", "worker__pid"))
    demo.check(
        noted == leased,
        f"what the functions wrote down agrees with the ledger: {len(noted)} runs under "
        f"{len(leased)} leases",
        noted ^ leased,
    )


SCENES: Final[tuple[tuple[str, Callable[[Demo], None]], ...]] = (
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


def _seconds_between(earlier: Lease, later: Lease) -> float:
    waited: timedelta = later.acquired_at - (earlier.ended_at or later.acquired_at)
    return waited.total_seconds()


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


def _listed(values: list[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last
