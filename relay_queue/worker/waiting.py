"""How a loop sleeps, and what it hears from slots, bell, supervisor and operator."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from relay_queue.query import looks
from relay_queue.states import WorkerOrder
from relay_queue.wakeup import Bell
from relay_queue.worker.options import ANSWERED, DRAIN, LOOK, QUIT, WAITS


@dataclass(slots=True)
class Woken:
    """Why a sleep ended. ``late_seconds`` is how much longer it lasted than was asked for."""

    rung: bool = False
    look: bool = False
    drain: bool = False
    quit: bool = False
    late_seconds: float = 0.0


class Waiting:
    """The file descriptors that wake a loop."""

    def __init__(self, control: int) -> None:
        self._control = socket.socket(fileno=os.dup(control))
        self._control.setblocking(False)
        self._bell: Bell | None = None
        self._waking = threading.Lock()
        self._closed = False
        self._asleep = False
        self._wanted = False
        self._held_up = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)

    def listen_to(self, bell: Bell) -> None:
        """Let a bell end the sleep, too."""
        self._bell = bell
        self._selector.register(bell, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the sleep, if there is one; called by slots, from any thread."""
        self._wanted = True
        if not self._asleep:
            return  # noted; a write to the pipe would cost more than many a function
        with self._waking:
            if self._closed:
                return
            with suppress(BlockingIOError):  # a full pipe wakes as well
                os.write(self._wake_writer, b"!")

    def say(self, word: bytes) -> None:
        """Tell the supervisor something; if it is gone, the next sleep finds out."""
        with suppress(OSError):
            self._control.send(word)

    def hold_up(self, held_up: bool) -> None:
        """Tell the supervisor, at a change, whether the start waits for the database."""
        if held_up is not self._held_up:
            self._held_up = held_up
            self.say(WAITS if held_up else ANSWERED)

    def forget_wakes(self) -> None:
        """Forget the wakes until now; call it before looking at what they were about."""
        self._wanted = False

    def wait(self, seconds: float) -> Woken:
        """Sleep for at most ``seconds`` and return what ended the sleep."""
        began = time.monotonic()
        # In this order: a thread that wakes us notes it first, and then sees whether we sleep.
        self._asleep = True
        if self._wanted:
            seconds = 0.0
        woken = Woken()
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._control:
                self._listen(woken)
            elif self._bell is not None and key.fileobj is self._bell:
                woken.rung = self._bell.clear() > 0
            else:
                with suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
        self._asleep = self._wanted = False
        woken.late_seconds = time.monotonic() - began - seconds
        return woken

    def close(self) -> None:
        """Close everything but the bell, which belongs to the worker's identity."""
        self._selector.close()
        self._control.close()
        # Under the lock of `wake`: a function that returns late would else write its wake-up into
        # whatever file has got the number by then.
        with self._waking:
            self._closed = True
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _listen(self, woken: Woken) -> None:
        try:
            orders = self._control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            orders = b""
        if not orders:
            # The supervisor is gone. Without unregistering, every sleep would end at once.
            self._selector.unregister(self._control)
            woken.drain = True
        woken.drain = woken.drain or DRAIN in orders
        woken.quit = woken.quit or QUIT in orders
        woken.look = woken.look or LOOK in orders


class Orders:
    """The order on a worker's row. Reads only.

    The row carries it and not a signal: every machine that can write the database can then give
    orders. An order that is given while the worker is stopped or busy is still there when the
    worker reads.
    """

    def __init__(self, worker_id: int) -> None:
        self._worker_id = worker_id
        self.current = ""
        """What was read last: a value of `WorkerOrder`, or empty."""

    @property
    def quiet(self) -> bool:
        """Whether nothing more is to be claimed."""
        return self.current == WorkerOrder.QUIET

    @property
    def stop(self) -> bool:
        """Whether the process is to finish what runs, and end."""
        return self.current == WorkerOrder.STOP

    @property
    def stop_reason(self) -> str:
        """What to write on the row of a process that ends."""
        return "stopped by an operator" if self.stop else "stopped"

    def read(self) -> bool:
        """Read the order, and say whether it is another than before.

        A worker whose row was deleted keeps its order, and registers again with it.
        """
        before, found = self.current, looks.order_of(self._worker_id)
        self.current = before if found is None else found
        return self.current != before
