"""One worker process as its supervisor sees it: fork, the control channel, the end.

Nothing here decides when to start or to stop a process; that is ``supervisor.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from relay_queue.worker import lifetime
from relay_queue.worker.options import ANSWERED, DISMISSED, READY, WAITS, WorkerOptions
from relay_queue.worker.signalling import WATCHED_SIGNALS, become_worker

logger = logging.getLogger("relay_queue.supervisor")

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
    task functions left behind, and nobody else would reap that.
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
