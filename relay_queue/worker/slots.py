"""The places of a worker process in which functions run.

Only the loop's thread calls the methods of `Slots`, so nothing here needs a lock: slot threads take
work from one queue and put what is finished in another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic

from relay_queue.context import JobContext
from relay_queue.store.records import Claim
from relay_queue.worker import report
from relay_queue.worker.executor import Call, Finished, Outcome, begin, conclude
from relay_queue.worker.hygiene import clean_connections, close_connections
from relay_queue.worker.line import Line

logger = logging.getLogger(__name__)

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
    until `take_finished` has handed it over, so at most ``concurrency`` outcomes ever wait.
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
        self._coroutines = _CoroutineThread()

    @property
    def free(self) -> int:
        """How many more jobs can start."""
        return self.concurrency - len(self.running)

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
        """Run a job as soon as its thread gets the processor. Raises ``RuntimeError`` if full."""
        if len(self.running) >= self.concurrency:
            raise RuntimeError(
                f"all {self.concurrency} slots are taken; start no more jobs than are free"
            )
        self.running[claim.lease_id] = Running(claim, context, monotonic())
        self._work.put((claim, partial(self._begin, claim, context)))
        # No job waits for a thread that another job holds: there is one for each that runs.
        if self._threads < len(self.running):
            self._threads += 1
            self._start_thread(f"relay-slot-{self._threads}")

    def _start_thread(self, name: str) -> None:
        """Start a thread, or do with those there are: the job is claimed and must not be lost."""
        try:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        except RuntimeError:
            self._threads -= 1
            if not self._threads:
                raise
            logger.exception("no more threads; %d slots serve for all", self._threads)

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
        while (work := self._work.get()) is not None:
            claim, step = work
            self._tell()  # outcomes that wait must not wait for this job, which may take long
            try:
                finished = step()
            except BaseException as error:  # noqa: BLE001 - no step raises; if one does, we live
                finished = Finished(claim, report.describe(claim, error), 0.0)
            left = clean_connections()
            if finished is not None:
                if left and finished.settled is None:
                    finished.settlement = report.uncommitted(claim, finished.settlement, left)
                self._finished.append(finished)
            self._tell()
        close_connections()

    def _begin(self, claim: Claim, context: JobContext) -> Finished | None:
        self.running[claim.lease_id].thread = threading.get_ident()
        call = begin(claim, context)
        if isinstance(call, Finished):
            return call
        if not call.plan.is_coroutine:
            return conclude(call, call.invoke)
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

    def run(self, call: Call, on_outcome: Callable[[Outcome], None]) -> None:
        """Run the coroutine of a call and give its outcome to ``on_outcome``. Any thread."""
        self._started().call_soon_threadsafe(self._create, call, on_outcome)

    def close(self) -> None:
        """Stop the loop; coroutines that are still running end where they are."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                arguments = (self._loop,)
                threading.Thread(
                    target=_run_loop, args=arguments, name="relay-slot-loop", daemon=True
                ).start()
            return self._loop

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
