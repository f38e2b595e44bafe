"""The places of a worker process in which functions run.

Only the loop's thread calls the methods of `Slots`, so nothing here needs a lock: slot threads take
work from one queue and put what is finished in another.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

from relay_queue.logs import get_logger
from relay_queue.worker import outcome
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.executor import begin, conclude, invoke_async
from relay_queue.worker.threads import close_connections, follow_threads

logger = get_logger(__name__)

SHORTAGE_SECONDS = 10.0
"""How long a process makes do with the threads it has, once the system gave it no more."""

IDLE_SECONDS = 1.0
"""How long a slot waits after a failure before it takes the time for a collection of garbage."""

Entry = TypeVar("Entry")


class WorkQueue(Generic[Entry]):
    """First in, first out, between any threads. It wakes one thread at a time.

    A ``SimpleQueue`` wakes a thread for each entry. Where work takes microseconds all but one wake
    for nothing, and the switches cost more than the work. Here the thread that takes an entry wakes
    the next thread only if more entries are left. A quick entry is followed by the next in the same
    thread. One that blocks leaves the processor to a thread that is awake already.
    """

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        # True from before a wake is put until after it was taken: one at a time is enough, since
        # its taker looks at the entries afterwards. Two at once, by a race, do no harm.
        self._waking = False

    def __bool__(self) -> bool:
        """Whether entries wait for a thread."""
        return bool(self._entries)

    def put(self, entry: Entry) -> None:
        """Add an entry; never waits."""
        self._entries.append(entry)
        self._wake()

    def get(self, seconds: float | None = None) -> Entry:
        """Take the first entry, waiting until there is one.

        Raises ``queue.Empty`` if none came within ``seconds``; None waits for ever.
        """
        while True:
            try:
                entry = self._entries.popleft()
            except IndexError:
                self._wakes.get(timeout=seconds)
                self._waking = False
                continue
            if self._entries:
                self._wake()
            return entry

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            self._wakes.put(None)


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
        self.busy = 0
        """How many slots are taken."""

        self._on_finished = on_finished
        self._work: WorkQueue[Attempt | None] = WorkQueue()
        self._finished: deque[Attempt] = deque()
        self._stuck: set[Attempt] = set()
        # Locked while the loop is woken for outcomes and has not taken them. A lock, because taking
        # it says whether this thread was the first.
        self._woken = threading.Lock()
        self._threads = 0
        self._short_until = 0.0
        self._coroutines = _CoroutineThread()
        self._failed = False
        follow_threads()

    @property
    def places(self) -> int:
        """How many jobs can run at once: fewer while the system gives no more threads."""
        return self._threads if monotonic() < self._short_until else self.concurrency

    @property
    def free(self) -> int:
        """How many more jobs can start."""
        return max(0, self.places - self.busy)

    @property
    def stuck(self) -> int:
        """How many slots are held by functions whose lease is over."""
        return len(self._stuck)

    @property
    def stuck_threads(self) -> set[int]:
        """The idents of the threads whose functions go on after their lease is over."""
        return {a.thread for a in self._stuck if a.thread is not None}

    @property
    def has_finished(self) -> bool:
        """Whether outcomes wait to be taken."""
        return bool(self._finished)

    def stuck_leases(self) -> set[int]:
        """Return the ids of the leases that are over although their functions go on."""
        return {attempt.claim.lease_id for attempt in self._stuck}

    def start(self, attempt: Attempt) -> None:
        """Run a job as soon as its thread gets the processor, or hand it back if there is none.

        Raises ``RuntimeError`` if full.
        """
        if self.busy >= self.concurrency:
            raise RuntimeError(
                f"all {self.concurrency} slots are taken; start no more jobs than are free"
            )
        self.busy += 1
        attempt.in_slot = True
        # No job waits for a thread that another job holds: there is one for each that runs.
        if self._threads < self.busy and not self._start_thread():
            attempt.end_unrun(attempt.claim.settlement("release", unrun=True))
            self._finished.append(attempt)
            return
        self._work.put(attempt)

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

    def take_finished(self) -> list[Attempt]:
        """Return the attempts that have ended since, and free their slots. Never waits."""
        # Before they are taken: an outcome that is added meanwhile is taken now, or wakes the loop.
        if self._woken.locked():
            self._woken.release()
        taken = []
        while self._finished:
            attempt = self._finished.popleft()
            attempt.in_slot = False
            if attempt.stuck:
                self._stuck.discard(attempt)
            taken.append(attempt)
        self.busy -= len(taken)
        return taken

    def mark_stuck(self, attempt: Attempt) -> None:
        """Note that the lease of a running job is over. Its slot is free when it returns."""
        if attempt.in_slot:
            attempt.stuck = True
            self._stuck.add(attempt)

    def close(self) -> None:
        """End the threads that are idle, and the others when their functions return."""
        for _ in range(self._threads):
            self._work.put(None)
        self._coroutines.close()

    def _serve(self) -> None:
        # A call for each attempt: a thread that waits for work then holds nothing of the last one.
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Do the next piece of work, or say that there is no more."""
        attempt = self._next()
        if attempt is None:
            return False
        self._wake_loop()  # outcomes that wait must not wait for this job, which may take long
        try:
            # One copy of the context: what receivers and the function set there ends with the job.
            over = copy_context().run(self._run, attempt)
        except BaseException as error:  # noqa: BLE001 - no step raises; if one does, we live
            attempt.end_unrun(outcome.describe(attempt.claim, error))
            over = True
        left = close_connections()
        if over:
            if left and attempt.settled is None:
                attempt.settlement = outcome.uncommitted(attempt.claim, attempt.settlement, left)
            if attempt.settlement.verb != "ack":
                self._failed = True
            self._finished.append(attempt)
        self._wake_loop()
        return True

    def _next(self) -> Attempt | None:
        """Wait for work. After failures, collect garbage once the slot idles.

        An error in a cycle with its frames holds all that they hold until a collection. An idle
        process never comes to one by itself.
        """
        if self._failed:
            try:
                return self._work.get(IDLE_SECONDS)
            except Empty:
                self._failed = False
                gc.collect()
        return self._work.get()

    def _run(self, attempt: Attempt) -> bool:
        """Run an attempt, or conclude that of a coroutine; say whether it is over."""
        if attempt.coroutine_result is None:
            attempt.thread = threading.get_ident()
            if not begin(attempt):
                return True
            if attempt.plan.is_coroutine and self._run_coroutine(attempt):
                return False
        conclude(attempt)
        return True

    def _run_coroutine(self, attempt: Attempt) -> bool:
        """Give a coroutine to the event loop, or run it here if there is no thread for the loop."""
        if not self._coroutines.start():
            # asgiref would ask for a thread, too.
            attempt.coroutine_result = copy_context().run(asyncio.run, invoke_async(attempt))
            return False
        attempt.thread = None  # from here on no thread is its own
        self._coroutines.run(attempt, self._work.put)
        return True

    def _wake_loop(self) -> None:
        """Wake the loop for outcomes, unless this thread takes a job next and can wake it for both."""
        if self._finished and not self._work and self._woken.acquire(blocking=False):
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

        Without a thread there is no loop either: a coroutine on a loop that does not run never
        ends.
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

    def run(self, attempt: Attempt, hand_back: Callable[[Attempt], None]) -> None:
        """Run a coroutine, then call ``hand_back`` from the event loop's thread. Any thread."""
        assert self._loop is not None, "started before"
        self._loop.call_soon_threadsafe(self._create, attempt, hand_back)

    def close(self) -> None:
        """Stop the loop; coroutines that are still running end where they are."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _create(self, attempt: Attempt, hand_back: Callable[[Attempt], None]) -> None:
        async def run() -> None:
            attempt.coroutine_result = await invoke_async(attempt)
            # Signals and what else comes afterwards must not hold up the event loop.
            hand_back(attempt)

        name = f"relay-job-{attempt.claim.job_id}"
        task = asyncio.get_running_loop().create_task(run(), name=name)
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
