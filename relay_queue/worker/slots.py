"""The places of a worker process in which functions run.

Only the loop's thread calls the methods of `Slots`, so nothing here needs a lock: slot threads take
work from one queue and put what is finished in another.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import Empty
from time import monotonic

from relay_queue.context import JobContext
from relay_queue.store.records import Claim
from relay_queue.worker import report
from relay_queue.worker.executor import Call, Finished, Outcome, begin, conclude
from relay_queue.worker.hygiene import close_connections
from relay_queue.worker.line import Line
from relay_queue.worker.threads import follow_threads
from relay_queue.worker.words import released

logger = logging.getLogger(__name__)

SHORTAGE_SECONDS = 10.0
"""How long a process makes do with the threads it has, once the system gave it no more."""

IDLE_SECONDS = 1.0
"""How long a slot waits after a failure before it takes the time for a collection of garbage."""

Step = Callable[[], Finished | None]
"""A piece of work for a slot thread. It returns nothing if a coroutine goes on elsewhere."""


@dataclass(slots=True)
class Running:
    """A job that holds a slot. ``started`` is a reading of ``time.monotonic``.

    ``thread`` is the ident of the thread that runs it, once it does. ``stuck`` means that its lease is over but the function has not returned.
    """

    claim: Claim
    context: JobContext
    started: float
    stuck: bool = False
    thread: int | None = None


class Slots:
    """Runs up to ``concurrency`` jobs at once.

    Functions run in threads, which are started when they are first needed and do not keep the
    process from ending. Coroutines run as tasks of one event loop in a thread of its own; what
    comes before and after them, signals for example, runs in the slot threads. A job holds its slot
    until `take_finished` has handed it over, so at most ``concurrency`` outcomes ever wait. A job
    for which the system gives no thread goes back uncharged: it must not wait behind another, which
    may never end.
    """

    def __init__(self, concurrency: int, on_finished: Callable[[], None]) -> None:
        """``on_finished`` is called from slot threads when the first outcome waits to be taken."""
        self.concurrency = concurrency
        self.running: dict[int, Running] = {}
        self._on_finished = on_finished
        self._work: Line[tuple[Claim, Step] | None] = Line()
        self._finished: deque[Finished] = deque()
        # Locked while outcomes wait that the loop was told of. A lock, because taking it says
        # whether this thread was the first.
        self._told = threading.Lock()
        self._threads = 0
        self._short_until = 0.0
        self._coroutines = _CoroutineThread()
        self._failed = False
        follow_threads()

    @property
    def places(self) -> int:
        """How many jobs can run at once: fewer than wanted while the system gives no more threads."""
        return self._threads if monotonic() < self._short_until else self.concurrency

    @property
    def free(self) -> int:
        """How many more jobs can start."""
        return max(0, self.places - len(self.running))

    @property
    def stuck(self) -> int:
        """How many slots are held by functions whose lease is over."""
        return sum(running.stuck for running in self.running.values())

    @property
    def stuck_threads(self) -> set[int]:
        """The idents of the threads whose functions go on after their lease is over."""
        running = self.running.values()
        return {r.thread for r in running if r.stuck and r.thread is not None}

    @property
    def has_finished(self) -> bool:
        """Whether outcomes wait to be taken."""
        return bool(self._finished)

    def start(self, claim: Claim, context: JobContext) -> None:
        """Run a job as soon as its thread gets the processor, or hand it back if there is none.

        Raises ``RuntimeError`` if full.
        """
        if len(self.running) >= self.concurrency:
            raise RuntimeError(
                f"all {self.concurrency} slots are taken; start no more jobs than are free"
            )
        self.running[claim.lease_id] = Running(claim, context, monotonic())
        # No job waits for a thread that another job holds: there is one for each that runs.
        if self._threads < len(self.running) and not self._start_thread():
            self._finished.append(Finished(claim, released(claim), 0.0))
            return
        self._work.put((claim, partial(self._begin, claim, context)))

    def _start_thread(self) -> bool:
        """Start one more thread; say whether the system gave it."""
        name = f"relay-slot-{self._threads + 1}"
        try:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        except RuntimeError as error:
            logger.error("No thread for another slot (%s); %d go on.", error, self._threads)
            self._short_until = monotonic() + SHORTAGE_SECONDS
            return False
        self._threads += 1
        return True

    def take_finished(self) -> list[Finished]:
        """Return the outcomes since the last call and free their slots. Never waits."""
        # Before they are taken: one that is added meanwhile is either taken now or told anew.
        if self._told.locked():
            self._told.release()
        taken = []
        while self._finished:
            finished = self._finished.popleft()
            del self.running[finished.claim.lease_id]
            taken.append(finished)
        return taken

    def mark_stuck(self, lease_id: int) -> None:
        """Note that the lease of a running job is over. Its slot is free when it returns."""
        if lease_id in self.running:
            self.running[lease_id].stuck = True

    def close(self) -> None:
        """End the threads that are idle, and the others when their functions return."""
        for _ in range(self._threads):
            self._work.put(None)
        self._coroutines.close()

    def _serve(self) -> None:
        # A call for each piece: while this thread waits for the next it holds nothing of the last.
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Do the next piece of work, or say that there is no more."""
        work = self._next()
        if work is None:
            return False
        claim, step = work
        self._tell()  # outcomes that wait must not wait for this job, which may take long
        try:
            # In a copy of the context: what a receiver of a signal sets there ends with the job.
            finished = copy_context().run(step)
        except BaseException as error:  # noqa: BLE001 - no step raises; if one does, we live
            finished = Finished(claim, report.describe(claim, error), 0.0)
        left = close_connections()
        if finished is not None:
            if left and finished.settled is None:
                finished.settlement = report.uncommitted(claim, finished.settlement, left)
            self._failed = self._failed or finished.settlement.verb != "ack"
            self._finished.append(finished)
        self._tell()
        return True

    def _next(self) -> tuple[Claim, Step] | None:
        """Wait for work. An error in a cycle with its frames holds all that they hold until a
        collection, which an idle process never comes to by itself: after failures it is made here.
        """
        if self._failed:
            try:
                return self._work.get(IDLE_SECONDS)
            except Empty:
                self._failed = False
                gc.collect()
        return self._work.get()

    def _begin(self, claim: Claim, context: JobContext) -> Finished | None:
        self.running[claim.lease_id].thread = threading.get_ident()
        call = begin(claim, context)
        if isinstance(call, Finished):
            return call
        if not call.plan.is_coroutine:
            return conclude(call, call.invoke)
        if not self._coroutines.start():
            # asgiref would ask for a thread, too.
            return conclude(call, copy_context().run(asyncio.run, call.invoke_async()))
        self.running[claim.lease_id].thread = None  # from here on no thread is its own
        self._coroutines.run(call, partial(self._conclude_later, call))
        return None

    def _conclude_later(self, call: Call, outcome: Outcome) -> None:
        """Hand a coroutine's outcome back to a slot thread; the event loop must not be held up."""
        self._work.put((call.claim, partial(conclude, call, outcome)))

    def _tell(self) -> None:
        """Tell the loop of outcomes, unless this thread takes a job next and can tell of both."""
        if self._finished and not self._work and self._told.acquire(blocking=False):
            self._on_finished()


class _CoroutineThread:
    """An event loop in a thread, started with the first coroutine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # An event loop holds its tasks weakly only.
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> bool:
        """Start the loop if it does not run; say whether it does. Any thread.

        Without a thread there is no loop either: what is given to one that nobody runs never ends.
        """
        with self._lock:
            if self._loop is not None:
                return True
            loop = asyncio.new_event_loop()
            try:
                threading.Thread(
                    target=_run_loop, args=(loop,), name="relay-slot-loop", daemon=True
                ).start()
            except RuntimeError as error:
                logger.error("No thread for coroutines (%s); this one runs in its slot.", error)
                loop.close()
                return False
            self._loop = loop
            return True

    def run(self, call: Call, on_outcome: Callable[[Outcome], None]) -> None:
        """Run the coroutine of a call and give its outcome to ``on_outcome``. Any thread."""
        assert self._loop is not None, "started before"
        self._loop.call_soon_threadsafe(self._create, call, on_outcome)

    def close(self) -> None:
        """Stop the loop; coroutines that are still running end where they are."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _create(self, call: Call, on_outcome: Callable[[Outcome], None]) -> None:
        async def run() -> None:
            on_outcome(await call.invoke_async())

        task = asyncio.get_running_loop().create_task(run(), name=f"relay-job-{call.claim.job_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped.

    asyncio lets SystemExit and KeyboardInterrupt of any task end the loop, and with it all others.
    """
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except BaseException:  # even SystemExit is one coroutine's doing
            with suppress(Exception):  # a log handler may raise
                logger.warning("a coroutine stopped the event loop; it goes on", exc_info=True)
        else:
            return loop.close()
