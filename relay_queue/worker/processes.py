"""The worker processes as their supervisor sees them: signals, fork, the control channel, the end.

Nothing here decides when to start or to stop a process; that is ``supervisor.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import NoReturn, Protocol, Self

from relay_queue.logs import get_logger
from relay_queue.startup import STOP_SIGNALS
from relay_queue.worker import lifetime
from relay_queue.worker.options import ANSWERED, DISMISSED, READY, WAITS, WorkerOptions

WATCHED_SIGNALS = STOP_SIGNALS | {signal.SIGCHLD}
"""Signals that a supervisor waits for."""


def leave_to_supervisor(number: int, frame: FrameType | None) -> None:
    """Do nothing on a signal that went to the whole group: the order to stop comes by pipe."""


def become_worker(signal_mask: Iterable[int]) -> None:
    """Undo in a forked child what `SignalSource` did, and let go of the signals it held back.

    ``signal_mask`` are the signals that were blocked before the fork.
    """
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        # Not SIG_IGN: programs started by task functions would inherit that, and could then not
        # be stopped. A signal that was ignored before, as under nohup, stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave_to_supervisor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)


class SignalSource:
    """The signals that a supervisor waits for, as something to select on. Main thread only.

    Handlers and the wake-up descriptor are put back at the end of the ``with`` block.
    """

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {
            number: signal.signal(number, leave_to_supervisor)
            for number in WATCHED_SIGNALS
            # What the parent has ignored, as nohup does, stays so. The ends of children count.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self.close()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a signal."""
        return self._reader.fileno()

    def read(self) -> bytes:
        """Return the numbers of the signals that came, one byte each."""
        return self._reader.recv(4096)

    def close(self) -> None:
        """Close the descriptors, without touching the handlers."""
        self._reader.close()
        self._writer.close()


logger = get_logger("relay_queue.supervisor")

ChildMain = Callable[[WorkerOptions, int], int]
"""What a worker runs: takes its options and the control descriptor, returns the exit code."""


class Closeable(Protocol):
    """Anything that holds a descriptor."""

    def close(self) -> None:
        """Let the descriptor go."""


@dataclass(slots=True)
class Child:
    """A running worker process. Times are of the monotonic clock."""

    pid: int
    control: socket.socket
    started: float = field(default_factory=time.monotonic)
    ready: float | None = None
    killed: bool = False
    dismissed: bool = False
    counted_seconds: float = 0.0
    counts_since: float | None = field(default_factory=time.monotonic)

    def tell(self, order: bytes) -> None:
        """Send one order. A process that is gone, or too full to take it, is left alone.

        Only a process that has read nothing for hundreds of orders is full. It would not act on
        this one either, and the deadlines of the supervisor end it.
        """
        with contextlib.suppress(OSError):
            self.control.send(order)

    def listen(self) -> bool:
        """Read and note what the process says. False once it has hung up."""
        try:
            said = self.control.recv(64)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if READY in said and self.ready is None:
            self.ready = time.monotonic()
        self.dismissed = self.dismissed or DISMISSED in said
        for word in (said[at : at + 1] for at in range(len(said))):
            self._count(word)
        return bool(said)

    def ready_by(self, limit_seconds: float) -> float | None:
        """Return when it is to be ready, if it may take so long; None while nothing is counted.

        Time in which the database does not answer counts for nothing: no start is to blame for it.
        """
        if self.counts_since is None or self.ready is not None or self.killed:
            return None
        return self.counts_since + limit_seconds - self.counted_seconds

    def _count(self, word: bytes) -> None:
        if word == WAITS and self.counts_since is not None:
            self.counted_seconds += time.monotonic() - self.counts_since
            self.counts_since = None
        elif word == ANSWERED and self.counts_since is None:
            self.counts_since = time.monotonic()

    def kill(self) -> None:
        """Send SIGKILL. The process has not been reaped, so its id is still its own."""
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)


def reap() -> dict[int, int]:
    """Reap every child that has ended: process id to exit code, or to the negated signal.

    Not only workers: as process 1 of a container, the supervisor becomes the parent of whatever
    task functions left behind, which no other process would reap.
    """
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def fork_child(
    child_main: ChildMain, options: WorkerOptions, inherited: Iterable[Closeable]
) -> Child:
    """Start a worker process. Raises ``OSError`` if the system has no room for another.

    ``inherited`` are the supervisor's own sockets: the child closes them, or it would keep its
    siblings' control channels open when the supervisor dies.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    # A signal that arrives in the child before it has handlers of its own would run those of the
    # supervisor, which report to the supervisor: one signal to the group would count as two.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
    try:
        with lifetime.threads_at_rest() as quiet:
            if quiet:
                # Text that is still buffered would be written by both processes.
                lifetime.flush_standard_streams()
            pid = os.fork()
        if not pid:
            _live(child_main, options, theirs, [ours, *inherited], before)
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Child(pid, ours)


def _live(
    child_main: ChildMain,
    options: WorkerOptions,
    control: socket.socket,
    inherited: Iterable[Closeable],
    signal_mask: Iterable[int],
) -> NoReturn:
    """Be the worker, in the forked child, from its first step to its last."""
    code = 1
    try:
        become_worker(signal_mask)
        for item in inherited:
            item.close()
        lifetime.begin(options.name)
        code = child_main(options, control.fileno())
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:  # whatever it is, it must not run on into the supervisor's own code
        logger.exception("Worker %s failed", options.name)
    finally:
        lifetime.leave(code)
