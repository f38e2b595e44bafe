"""What a thread gets from the gate, and what it gets when time is up."""

from __future__ import annotations

import threading
from time import monotonic, time
from types import TracebackType
from typing import TYPE_CHECKING

from relay_queue.db.gatefile import Holder

if TYPE_CHECKING:
    from relay_queue.db.gate import Gate


class GateTimeout(Exception):
    """The gate was not free in time.

    ``path`` is the gate file, ``waited_seconds`` how long the caller waited, ``holder`` who
    held it at the end (None if that is not known).
    """

    def __init__(self, path: str, waited_seconds: float, holder: Holder | None) -> None:
        super().__init__(path, waited_seconds, holder)
        self.path = path
        self.waited_seconds = waited_seconds
        self.holder = holder

    def __str__(self) -> str:
        holder = self.holder or "a process that left no name"
        return (
            f"waited {self.waited_seconds:.1f} s for the writer gate {self.path}, held by {holder}"
        )


class Hold:
    """One stay behind the gate: the thread it belongs to and how many permits it has."""

    __slots__ = ("permits", "since", "since_epoch", "thread")

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.permits = 1
        self.since = monotonic()
        self.since_epoch = time()


class Permit:
    """The right to write, as a context manager.

    ``waited_seconds`` says how long it took to get. A permit that is lost (its thread died, its
    connection was garbage collected) releases itself.
    """

    __slots__ = ("_gate", "_hold", "waited_seconds")

    def __init__(self, gate: Gate) -> None:
        self.waited_seconds = 0.0
        self._gate = gate
        self._hold: Hold | None = None

    @property
    def gate(self) -> Gate:
        """The gate that this is a permit of."""
        return self._gate

    def release(self) -> None:
        """Give the permit back; the gate opens with the last one. May be repeated, any thread."""
        if self._hold is not None:
            self._gate._release(self)

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._hold is not None:
            self._gate._release_lost(self._hold)


class Waiter:
    """A thread that waits for its permit; ``granted`` is unlocked when it has come."""

    __slots__ = ("granted", "permit", "thread")

    def __init__(self, permit: Permit, thread: threading.Thread) -> None:
        self.permit = permit
        self.thread = thread
        self.granted = threading.Lock()
        self.granted.acquire()
