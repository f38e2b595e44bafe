"""The parent of the workers: starts them, replaces the dead, passes on the order to stop.

It opens no database, so that it can fork at any time and outlives whatever happens to the queue.
The only thread of its own writes its log lines, and rests while it forks.

It speaks to its workers through a socket each and never by signals: a terminal or an init system
signals the whole group at once, and a forwarded copy of the first signal would count as the second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from relay_queue.logs import get_logger
from relay_queue.worker.logwriter import log_writer
from relay_queue.worker.options import DRAIN, LOOK, QUIT, WorkerOptions
from relay_queue.worker.processes import Child, ChildMain, Closeable, SignalSource, fork_child, reap
from relay_queue.worker.watchdog import GateWatch

logger = get_logger("relay_queue.supervisor")

NEVER: Final = float("inf")
FIRST_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 10.0
# A worker that was ready for so long has proved itself: the next restart is quick again.
PROVEN_SECONDS = 60.0
MAX_FAILED_STARTS = 5
GATE_LOOK_SECONDS = 1.0
# A worker keeps its own shutdown timeout. These are for one that does not.
DRAIN_GRACE_SECONDS = 5.0
QUIT_GRACE_SECONDS = 15.0
LOG_SECONDS = 2.0  # for the last lines of the log to be written
# A terminal sends INT to the whole group, and a process manager in it passes it on as TERM.
# That is one order; a person who means it sends the same signal again.
ONE_ORDER_SECONDS = 1.0


class Stopping(IntEnum):
    """How far the supervisor has got with stopping. It only ever goes up."""

    NO = 0
    DRAINING = 1
    QUITTING = 2
    KILLED = 3


@dataclass(slots=True)
class ProcessSlot:
    """The place of one worker process, kept while processes come and go."""

    options: WorkerOptions
    child: Child | None = None
    start_at: float = 0.0
    delay_seconds: float = FIRST_DELAY_SECONDS
    failed_starts: int = 0
    closed: bool = False

    def record_failed_start(self) -> None:
        """Count a start that never got ready, and plan the next."""
        self.failed_starts += 1
        self._back_off()

    def record_end(self, ready: float) -> None:
        """Plan the replacement of a worker that was ready since ``ready`` (monotonic)."""
        self.failed_starts = 0
        if time.monotonic() - ready >= PROVEN_SECONDS:
            self.delay_seconds = FIRST_DELAY_SECONDS
        self._back_off()

    def replace(self) -> None:
        """Plan the replacement of a worker that has done as many jobs as it was asked to."""
        self.failed_starts, self.delay_seconds = 0, FIRST_DELAY_SECONDS
        self.start_at = time.monotonic()

    def _back_off(self) -> None:
        self.start_at = time.monotonic() + self.delay_seconds
        self.delay_seconds = min(MAX_DELAY_SECONDS, self.delay_seconds * 2)


class Supervisor:
    """Keeps ``processes`` workers running until it is told to stop or they have nothing to do.

    A worker that an operator has dismissed is not replaced; with the last of them it ends.

    Use it in the main thread of a process without other threads, children or open connections.
    """

    def __init__(
        self,
        options: WorkerOptions,
        processes: int,
        child_main: ChildMain,
        *,
        ready_timeout_seconds: float,
        gate_watch: GateWatch | None = None,
        parent: socket.socket | None = None,
    ) -> None:
        """Prepare to run ``child_main``, normally the worker's loop, in each process.

        ``parent`` is a socket over which another process passes on orders, the same bytes as to
        workers; its end of file means to drain. Without ``gate_watch`` no one is killed for
        holding the writer.
        """
        names = [options.name] if processes == 1 else _numbered(options.name, processes)
        self._slots = [ProcessSlot(dataclasses.replace(options, name=name)) for name in names]
        self._options = options
        self._ready_timeout_seconds = ready_timeout_seconds
        self._gate_watch = gate_watch
        self._gate_look_at = 0.0
        self._parent = parent
        self._child_main = child_main
        self._stopping = Stopping.NO
        self._first_signal: tuple[int, float] | None = None
        self._escalate_at = NEVER
        self._failed = False

    def run(self) -> int:
        """Supervise to the end. Returns 0, or 1 if it gave up or a worker did not end well."""
        log_writer.take_over()
        try:
            self._supervise()
        finally:
            log_writer.finish(LOG_SECONDS)
        return 1 if self._failed else 0

    def _supervise(self) -> None:
        with SignalSource() as signals, selectors.DefaultSelector() as selector:
            self._signals, self._selector = signals, selector
            selector.register(signals, selectors.EVENT_READ, self._on_signals)
            if self._parent is not None:
                selector.register(self._parent, selectors.EVENT_READ, self._on_parent)
            try:
                while not self._finished():
                    self._step()
            finally:
                # If an error in here ends the supervisor, this tells the workers to drain.
                for _, child in self._children():
                    child.control.close()

    def _step(self) -> None:
        for key, _ in self._selector.select(self._wait_seconds()):
            key.data()
        self._reap()
        self._kill_late_starts()
        self._look_at_gate()
        self._escalate()
        # Last, so that giving up on a start is seen before the next wait: without workers there
        # is nothing that would end it.
        self._start_due()

    def _finished(self) -> bool:
        return not self._children() and (bool(self._stopping) or not self._vacant())

    def _children(self) -> list[tuple[ProcessSlot, Child]]:
        return [(slot, slot.child) for slot in self._slots if slot.child is not None]

    def _vacant(self) -> list[ProcessSlot]:
        return [slot for slot in self._slots if slot.child is None and not slot.closed]

    def _wait_seconds(self) -> float | None:
        """Return the time to the next thing to do without being woken, or None for ever."""
        times = [self._escalate_at]
        if not self._stopping:
            times += [slot.start_at for slot in self._vacant()]
        children = [child for _, child in self._children()]
        times += [self._ready_deadline(child) for child in children]
        if children and self._gate_watch is not None:
            times.append(self._gate_look_at)
        first = min(times)
        return None if first == NEVER else max(0.0, first - time.monotonic())

    # --- Starting ----------------------------------------------------------------

    def _start_due(self) -> None:
        now = time.monotonic()
        for slot in self._vacant():
            # Checked for each slot: a start that fails may be the one at which it gives up.
            if slot.start_at <= now and not self._stopping:
                self._start(slot)

    def _start(self, slot: ProcessSlot) -> None:
        try:
            child = fork_child(self._child_main, slot.options, list(self._descriptors()))
        except OSError as error:
            self._count_failed_start(slot, f"could not be started: {error}")
            return
        slot.child = child
        self._selector.register(child.control, selectors.EVENT_READ, lambda: self._on_child(child))
        logger.debug("Worker %s started as process %d", slot.options.name, child.pid)

    def _descriptors(self) -> Iterator[Closeable]:
        """Yield everything that is open here and must not stay open in a worker."""
        yield from (self._selector, self._signals)
        if self._parent is not None:
            yield self._parent
        yield from (child.control for _, child in self._children())

    def _on_child(self, child: Child) -> None:
        if not child.listen():
            # It has hung up. Until it is reaped, its socket would wake the supervisor all the time.
            self._selector.unregister(child.control)

    def _ready_deadline(self, child: Child) -> float:
        deadline = child.ready_by(self._ready_timeout_seconds)
        return NEVER if deadline is None else deadline

    def _kill_late_starts(self) -> None:
        now = time.monotonic()
        for slot, child in self._children():
            if self._ready_deadline(child) <= now:
                self._kill(slot, child, f"not ready within {self._ready_timeout_seconds:g} s")

    def _kill(self, slot: ProcessSlot, child: Child, reason: str) -> None:
        logger.error("Killing worker %s, process %d: %s", slot.options.name, child.pid, reason)
        child.kill()

    # --- Ends --------------------------------------------------------------------

    def _reap(self) -> None:
        ended = reap()
        for slot, child in self._children():
            code = ended.get(child.pid)
            if code is None:
                continue
            child.listen()  # it may have become ready just before it ended
            with contextlib.suppress(KeyError):  # unregistered when it hung up
                self._selector.unregister(child.control)
            child.control.close()
            slot.child = None
            if code:
                self._tell_all(LOOK)
            self._judge(slot, child, code)

    def _judge(self, slot: ProcessSlot, child: Child, code: int) -> None:
        """Decide what the end of a worker means for its slot and for the whole."""
        end = f"process {child.pid}, ended {_described(code)}"
        if code and (self._stopping or self._options.drain):
            self._failed = True
        if self._stopping:
            logger.log(
                logging.ERROR if code else logging.DEBUG, "Worker %s, %s", slot.options.name, end
            )
        elif child.dismissed:
            slot.closed = True
            logger.info("Worker %s, %s, as an operator ordered", slot.options.name, end)
        elif self._options.drain and not code:
            slot.closed = True
        elif child.ready is None:
            self._count_failed_start(slot, f"{end} before it was ready")
        elif self._options.max_jobs is not None and not code:
            slot.replace()
        else:
            slot.record_end(child.ready)
            self._announce(slot, end)

    def _count_failed_start(self, slot: ProcessSlot, what: str) -> None:
        slot.record_failed_start()
        if slot.failed_starts < MAX_FAILED_STARTS:
            self._announce(slot, what)
            return
        logger.error(
            "Giving up: worker %s failed to start %d times in a row; the last one: %s. "
            "The log above has the cause",
            slot.options.name,
            slot.failed_starts,
            what,
        )
        self._failed = True
        self._stop(Stopping.DRAINING)

    def _announce(self, slot: ProcessSlot, what: str) -> None:
        logger.warning(
            "Worker %s, %s; starting another in %.1f s",
            slot.options.name,
            what,
            max(0.0, slot.start_at - time.monotonic()),
        )

    # --- The writer gate ---------------------------------------------------------

    def _look_at_gate(self) -> None:
        now = time.monotonic()
        if self._gate_watch is None or now < self._gate_look_at or not self._children():
            return
        self._gate_look_at = now + GATE_LOOK_SECONDS
        holder = self._gate_watch.overdue()
        for slot, child in self._children():
            if holder is not None and holder.pid == child.pid and not child.killed:
                self._kill(slot, child, f"it holds the database's writer gate: {holder}")

    # --- Stopping ----------------------------------------------------------------

    def _on_signals(self) -> None:
        for number in self._signals.read():
            if number in {signal.SIGTERM, signal.SIGINT}:
                again = self._is_second(number)
                # A person at a terminal waits for a word. To an init system it would be noise.
                level = logging.WARNING if number == signal.SIGINT else logging.INFO
                self._stop(Stopping.QUITTING if again else Stopping.DRAINING, level)
            elif number == signal.SIGHUP:
                # The terminal is gone. Some init systems send it right after the first SIGTERM.
                self._stop(Stopping.DRAINING)

    def _is_second(self, number: int) -> bool:
        """Whether TERM or INT is a second order, and not the first one by another way."""
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = number, now
            return False
        first, at = self._first_signal
        return number == first or now - at > ONE_ORDER_SECONDS

    def _on_parent(self) -> None:
        """Take orders from the process that started this one; its end is an order to drain."""
        assert self._parent is not None
        orders = self._parent.recv(64)
        self._stop(Stopping.QUITTING if QUIT in orders else Stopping.DRAINING)
        if not orders:
            self._selector.unregister(self._parent)

    def _stop(self, step: Stopping, level: int = logging.INFO) -> None:
        """Go as far as ``step``, and log it at ``level``. What was done already is not repeated."""
        if step <= self._stopping:
            return
        self._stopping = step
        now = time.monotonic()
        if step is Stopping.DRAINING:
            limit_seconds = self._options.shutdown_timeout_seconds
            self._tell_all(DRAIN)
            logger.log(
                level,
                "Stopping: workers have %g s to finish what they run. Told again, they hand it back",
                limit_seconds,
            )
            self._escalate_at = now + limit_seconds + DRAIN_GRACE_SECONDS
        elif step is Stopping.QUITTING:
            self._tell_all(QUIT)
            logger.warning("Stopping at once: workers hand back what they run")
            self._escalate_at = now + QUIT_GRACE_SECONDS
        else:
            for slot, child in self._children():
                self._kill(slot, child, "it did not stop when it was told to")
            self._escalate_at = NEVER

    def _escalate(self) -> None:
        """Go one step further if the workers have had their time."""
        if time.monotonic() >= self._escalate_at:
            self._stop(Stopping(self._stopping + 1))

    def _tell_all(self, order: bytes) -> None:
        for _, child in self._children():
            child.tell(order)


def _numbered(name: str, processes: int) -> list[str]:
    return [f"{name}-{number}" for number in range(1, processes + 1)]


def _described(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"by signal {-code}"
