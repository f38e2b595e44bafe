"""What a program does with signals before Relay, or even Django, is imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that mean "stop" to a supervisor, and nothing to a worker."""


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
