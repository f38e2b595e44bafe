"""When a loop reads the tables, and how many jobs it claims. All times are monotonic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from relay_queue import conf
from relay_queue.query import looks
from relay_queue.store.records import Claim
from relay_queue.worker.options import WorkerOptions
from relay_queue.worker.waiting import Woken

PROBE_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
FLUSH_SECONDS = 1.0
STALL_SECONDS = 1.0
"""A loop that is this late may not be alone: others may be late for the same reason."""

TICK_PAUSE_SECONDS = 1.0
"""The longest pause of ticks while something cannot be done."""

QUIET_SECONDS = 2.0
"""How long live owners have to renew before a loop that was late recovers by expiry again."""


class Timers:
    """The clocks of one loop.

    While a long transaction holds the writer, no owner can renew its leases. No lease may be ended
    for that. So a loop that waited long, or slept longer than it asked for, does not recover by
    expiry for a while. The owners behind it in the line renew first.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self.recovering = True
        self.due = False
        self.overdue = False
        """Whether the last plan found a job that is due, or a lease that is over."""

        self._look_at = now
        self._probe_at = now
        self._flush_at = now
        self._heartbeat_at = now + HEARTBEAT_SECONDS
        self._quiet_until = now
        self._claims_from = now
        self._retry_at = now

    def seconds_until(self, *others: float | None, dirty: bool) -> float:
        """Return how long the loop may sleep; ``dirty``: counted work waits to be written."""
        times = [self._look_at, self._probe_at, self._heartbeat_at]
        times += [moment for moment in others if moment is not None]
        if dirty:
            times.append(self._flush_at)
        if self._claims_from > time.monotonic():
            times.append(self._claims_from)
        return max(0.0, min(times) - time.monotonic())

    def overslept(self, seconds: float) -> None:
        """Note that the loop woke later than it asked for: it was stopped, or the machine was."""
        if seconds > STALL_SECONDS:
            self._quiet_until = time.monotonic() + QUIET_SECONDS

    def may_recover(self, waited_seconds: float) -> bool:
        """Say whether leases may be ended for being over; see the class."""
        self.overslept(waited_seconds)
        return time.monotonic() >= self._quiet_until

    def looked(self) -> None:
        """Note a look; the next comes after the poll interval, or when something is due."""
        self._look_at = time.monotonic() + conf.get().poll_seconds

    def plan(
        self, next_due_at: datetime | None, next_expiry_at: datetime | None, now: datetime
    ) -> None:
        """Plan by when the next job is due and the next lease runs out: a tick, or a look then."""
        monotonic = time.monotonic()
        self.overdue = any(at is not None and at <= now for at in (next_due_at, next_expiry_at))
        if next_due_at is not None:
            self._expect(monotonic, (next_due_at - now).total_seconds())
        if next_expiry_at is not None:
            quiet = self._quiet_until - monotonic
            self._expect(monotonic, max(quiet, (next_expiry_at - now).total_seconds()))

    def look_soon(self) -> None:
        """Look at the next turn: what is due next may have changed."""
        self._look_at = time.monotonic()

    def look_due(self) -> bool:
        """Whether it is time to look without a ring."""
        return time.monotonic() >= self._look_at

    def probed(self) -> None:
        """Note a probe of the siblings."""
        self._probe_at = time.monotonic() + PROBE_SECONDS

    def probe_in(self, seconds: float) -> None:
        """Probe once more so soon: a worker may have died."""
        self._probe_at = min(self._probe_at, time.monotonic() + seconds)

    def probe_due(self) -> bool:
        """Whether it is time to see which siblings have died."""
        return time.monotonic() >= self._probe_at

    def write_due(self, dirty: bool) -> bool:
        """Whether the worker's row, and the statistics if ``dirty``, must be written."""
        now = time.monotonic()
        return now >= self._heartbeat_at or (dirty and now >= self._flush_at)

    def write_soon(self) -> None:
        """Write the worker's row in the next tick: it may say that the worker is dead."""
        self._heartbeat_at = time.monotonic()

    def written(self) -> None:
        """Note that row and statistics were committed."""
        now = time.monotonic()
        self._flush_at = now + FLUSH_SECONDS
        self._heartbeat_at = now + HEARTBEAT_SECONDS

    def ticked(self, moved: int) -> None:
        """Note a committed tick that promoted or recovered ``moved`` jobs.

        One that was due and moved nothing met a row that only looks due; looking again at once
        would never end. The first recovery need not have succeeded: a table that refuses it keeps no
        worker from claims that runs already, and must not keep one that starts.
        """
        if self.due and moved:
            self.look_soon()
        self.due = False
        self.recovering = False

    def hold_claims(self, seconds: float) -> None:
        """Claim nothing for a while, and do not tick before, or for a second."""
        now = time.monotonic()
        self._claims_from, self._retry_at = now + seconds, now + min(seconds, TICK_PAUSE_SECONDS)

    def hold_ticks(self, seconds: float) -> None:
        """Do not tick for a while, at most for a second: other steps must not wait for one."""
        self._retry_at = time.monotonic() + min(seconds, TICK_PAUSE_SECONDS)

    def look_in(self, seconds: float) -> None:
        """Look and probe after so long: the last reads failed."""
        self._look_at = self._probe_at = time.monotonic() + seconds

    def write_in(self, seconds: float) -> None:
        """Write the worker's row and statistics after so long: the last time failed."""
        self._flush_at = self._heartbeat_at = time.monotonic() + seconds

    def retry_in(self) -> float:
        """Return how long to wait before the next tick."""
        return max(0.0, self._retry_at - time.monotonic())

    def may_claim(self) -> bool:
        """Whether claims are allowed: not before the first recovery, nor on a full disk."""
        return not self.recovering and time.monotonic() >= self._claims_from

    def _expect(self, monotonic: float, seconds: float) -> None:
        if seconds <= 0:
            self.due = True
        else:
            self._look_at = min(self._look_at, monotonic + seconds)


class Pace:
    """Begin with one job, double while the queues fill the claim, else fall back to one.

    A light load is then spread over the workers instead of being hoarded by the first to wake; a
    heavy one is taken in batches. ``more`` says that another claim may find something.

    After a ring, only a worker whose previous claim on a ring found a job claims without reading
    first: ``claims_on_ring``. The others read, so that many idle workers do not all open a write
    transaction for one job.
    """

    def __init__(self) -> None:
        self.more = False
        self.claims_on_ring = True
        self._on_ring = False
        self._size = 1
        self._last_queue: str | None = None
        self._rest_until = 0.0

    def ask(self, places: int) -> int:
        """Return how many jobs to claim when there is room for ``places``."""
        if not self.more or time.monotonic() < self._rest_until:
            return 0
        return min(places, self._size)

    def expect(self) -> None:
        """Claim because of a ring; what it finds decides how the next ring is answered."""
        self.more = self._on_ring = True

    def found_nothing(self) -> None:
        """Note that a read has found no work."""
        self.more = False
        self._size = 1

    def rest(self, seconds: float) -> None:
        """Claim nothing for a while: the last claim searched long and found nothing."""
        self._rest_until = time.monotonic() + seconds

    def ring(self, queues: Sequence[str]) -> list[str]:
        """Return the queues, beginning behind the one that the last claim ended with."""
        last = self._last_queue
        if last is None or last not in queues:
            return list(queues)
        start = list(queues).index(last) + 1
        return [*queues[start:], *queues[:start]]

    def learn(self, asked: int, claims: Sequence[Claim]) -> None:
        """Note how many jobs a claim asked for and got."""
        if asked < 1:
            return
        if self._on_ring:
            self.claims_on_ring, self._on_ring = bool(claims), False
        if claims:
            self._last_queue = claims[-1].queue
        self.more = len(claims) >= asked
        self._size = min(self._size * 2, 1 << 16) if self.more else 1


class QueueWatch:
    """Knows the queues, and answers the bell. Reads only; it steers pace and timers of one loop.

    A ring does not say what has happened. Mostly it is a job. So an idle worker claims at once, and
    makes a quick check in the next turn. The check finds a queue that is new, and plans for a job
    that is due later. A worker that runs functions makes the check first: one of its jobs may have
    been cancelled. That also lets idle workers be faster than busy ones.
    """

    def __init__(self, options: WorkerOptions, pace: Pace, timers: Timers) -> None:
        self.queues: list[str] = []
        """The queues that this worker serves, in order."""

        self.limited: set[str] = set()
        """The queues with a limit of running jobs."""

        self.check_due = False
        """Whether a ring was answered by a claim, and the quick check behind it is still to come."""

        self._options = options
        self._pace = pace
        self._timers = timers
        self._known: set[str] = set()
        self._rung = False

    def note(self, woken: Woken) -> None:
        """Note what ended a sleep. It is kept until a read has succeeded: one may fail."""
        self._rung = self._rung or woken.rung
        if woken.look:
            self._timers.look_soon()

    def read(self, *, may_claim_at_once: bool) -> bool:
        """Check as the bell and the timers ask for; say whether anything was read."""
        if self._timers.look_due():
            self._full_check()
        elif not self._rung:
            return False
        elif may_claim_at_once and self._pace.claims_on_ring and not self.check_due:
            self.check_due = True
            self._pace.expect()
            return False
        else:
            self._quick_check()
        return True

    def _quick_check(self) -> None:
        """Find out what a ring meant, in as few reads as possible: a job waits for them."""
        ready = looks.ready_queues()
        if ready - self._known:
            self._full_check()  # a queue that was not there before
            return
        self._rung = self.check_due = False
        if not ready.isdisjoint(self.queues):
            self._pace.expect()  # when the next job is due can wait for the next probe
        else:
            self._pace.found_nothing()
            self._timers.plan(*looks.next_times())

    def _full_check(self) -> None:
        found = looks.read_queues()
        self._rung = self.check_due = False
        self._timers.looked()
        self._timers.plan(found.next_due_at, found.next_expiry_at, found.now)
        self._known, self.limited = set(found.queues), found.limited
        self.queues = self._options.served(found.queues)
        if not found.ready.isdisjoint(self.queues):
            self._pace.more = True
