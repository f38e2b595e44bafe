"""A line of work for many threads, which wakes one of them at a time."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Line(Generic[Entry]):
    """First in, first out, between any threads.

    A ``SimpleQueue`` wakes a thread for each entry. Where work takes microseconds all but one wake
    for nothing, and the switches cost more than the work. Here who takes an entry wakes the next
    thread only if more is left: a quick entry is followed by the next in the same thread, and one
    that blocks leaves the processor to a thread that is awake already.
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
