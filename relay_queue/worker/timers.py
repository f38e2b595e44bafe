"""When a loop must look, probe, recover, write or hold back. All times are monotonic."""

from __future__ import annotations

import time
from datetime import datetime

from relay_queue import conf

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

    Nobody is expired for the database's sake: when a long transaction held the writer, no owner
    could renew. So a loop that waited long, or slept longer than it asked for, does not recover by
    expiry for a while, and the owners behind it in the line renew first.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self.recovering = True
        self.due = False
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
        if next_due_at is not None:
            self._expect(monotonic, (next_due_at - now).total_seconds())
        if next_expiry_at is not None:
            quiet = self._quiet_until - monotonic
            self._expect(monotonic, max(quiet, (next_expiry_at - now).total_seconds()))

    def look_soon(self) -> None:
        """Look at the next turn: what is due next may have changed."""
        self._look_at = time.monotonic()

    def look_due(self) -> bool:
        """Whether it is time to look although nobody rang."""
        return time.monotonic() >= self._look_at

    def probed(self) -> None:
        """Note a probe of the siblings."""
        self._probe_at = time.monotonic() + PROBE_SECONDS

    def probe_in(self, seconds: float) -> None:
        """Probe once more so soon: somebody may have died."""
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
        would never end.
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
        """Do not tick for a while, at most for a second: what can be done must not wait for the rest."""
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
