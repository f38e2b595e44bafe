"""What a loop knows of the queues, and how it learns more without the gate: by a look or a glance."""

from __future__ import annotations

from relay_queue.query import looks
from relay_queue.worker.options import WorkerOptions
from relay_queue.worker.pace import Pace
from relay_queue.worker.timers import Timers
from relay_queue.worker.waiting import Woken


class Listening:
    """Answers the bell. Reads the tables, and tells the pace and the timers of one loop.

    A ring says nothing of what has happened. Mostly it is a job, so an idle worker claims at once,
    and glances in the turn behind: that finds the queue that was not there before, and plans for a
    job that is due later. A worker that runs functions glances first. Its jobs may have been
    cancelled; and who has nothing to do is to be faster than who has.
    """

    def __init__(self, options: WorkerOptions, pace: Pace, timers: Timers) -> None:
        self.queues: list[str] = []
        self.limited: set[str] = set()
        self.owes_glance = False
        """Whether a ring was answered by a claim, and what else it can mean is still open."""
        self._options = options
        self._pace = pace
        self._timers = timers
        self._known: set[str] = set()
        self._rung = False

    def hear(self, woken: Woken) -> None:
        """Note what ended a sleep. It is kept until a read has succeeded: one may fail."""
        self._rung = self._rung or woken.rung
        if woken.look:
            self._timers.look_soon()

    def read(self, *, may_claim_at_once: bool) -> bool:
        """Look or glance, as the bell and the timers ask for; say whether anything was read."""
        if self._timers.look_due():
            self._look()
        elif not self._rung:
            return False
        elif may_claim_at_once and self._pace.sure and not self.owes_glance:
            self.owes_glance = True
            self._pace.expect()
            return False
        else:
            self._glance()
        return True

    def _glance(self) -> None:
        """What a ring can mean, in as few reads as possible: the way of a job to its function."""
        ready = looks.ready_queues()
        if ready - self._known:
            self._look()  # a queue that was not there before
            return
        self._rung = self.owes_glance = False
        if not ready.isdisjoint(self.queues):
            self._pace.expect()  # when the next job is due can wait for the next probe
        else:
            self._pace.see_none()
            self._timers.plan(*looks.next_times())

    def _look(self) -> None:
        found = looks.read_queues()
        self._rung = self.owes_glance = False
        self._timers.looked()
        self._timers.plan(found.next_due_at, found.next_expiry_at, found.now)
        self._known, self.limited = set(found.queues), found.limited
        self.queues = self._options.served(found.queues)
        if not found.ready.isdisjoint(self.queues):
            self._pace.more = True
