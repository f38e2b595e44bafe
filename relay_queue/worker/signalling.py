"""How a supervisor hears of signals, and how its workers do not."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that mean "stop" to a supervisor, and nothing to a worker."""

WATCHED_SIGNALS = STOP_SIGNALS | {signal.SIGCHLD}
"""Signals that a supervisor waits for."""


def stop_while_starting() -> None:
    """Let the signals to stop end this process at once, until a supervisor waits for them.

    Call it before the project is imported, in ``manage.py``. The kernel keeps from process 1, as a
    container's program is, every signal that it has no handler for.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_at_once)


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Let the signals to stop end this process within; `SignalSource` may take them meanwhile."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop_while_starting()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    # No exception: the code that is being imported may catch it. Nothing has begun that could be lost.
    os._exit(128 + number)  # as shells report a signal


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
