"""How a supervisor hears of signals, and how its workers do not."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Self

from relay_queue.startup import STOP_SIGNALS

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
