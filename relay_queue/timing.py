"""When a schedule runs: by a cron expression in a time zone, or every so many seconds.

All moments are aware UTC. A cron expression has five fields and means what it means to Debian's cron;
the package ``cronsim`` reads it. Where the clocks of a zone change, a slot at a fixed time runs once: in
the gap at its end, in the repeated hour at its first pass. If minute or hour begin with ``*``, slots
in the gap do not exist, and those of the repeated hour run in both passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Any, Final, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from relay_queue.exceptions import InvalidSchedule, shown

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_SPAN: Final = timedelta(hours=1)
LONGEST_LOOK: Final = timedelta(days=366 * 10)
"""How far back slots are looked for: an expression may have hardly any."""

MANY_SLOTS: Final = 50

KEY: Final = "schedule:"
"""How the idempotency key of a scheduled job begins; its slot is the last part."""


MIN_EVERY_SECONDS: Final = 1.0
MAX_EVERY_SECONDS: Final = 366 * 86_400.0
MAX_EXPRESSION_CHARS: Final = 100

ALIASES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}
"""Names of common expressions, as other crons have them."""


class Timing(Protocol):
    """The slots of a schedule, each a moment for which it runs once."""

    def after(self, moment: datetime) -> datetime | None:
        """Return the first slot later than a moment; None if there is none in fifty years."""

    def backwards(self, moment: datetime) -> Iterator[datetime]:
        """Yield the slots up to a moment, that one included, the newest first."""


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression of five fields, or one of `ALIASES`, in an IANA time zone.

    Raises `InvalidSchedule` for what is neither.
    """

    expression: str
    zone: str = "UTC"

    def __post_init__(self) -> None:
        _zone(self.zone)
        if not isinstance(self.expression, str) or len(self.expression) > MAX_EXPRESSION_CHARS:
            raise InvalidSchedule(
                f"the cron expression is {shown(self.expression)}; use text of at most "
                f"{MAX_EXPRESSION_CHARS} characters"
            )
        if len(self._fields.split()) != 5:
            raise InvalidSchedule(
                f"the cron expression {self.expression!r} has not five fields: minute, hour, day of "
                f"the month, month, day of the week. Or use one of {', '.join(ALIASES)}; for seconds, "
                "every()"
            )
        try:
            CronSim(self._fields, EPOCH)
        except CronSimError as error:
            raise InvalidSchedule(f"the cron expression {self.expression!r}: {error}") from error

    @property
    def _fields(self) -> str:
        return ALIASES.get(self.expression.strip().lower(), self.expression)

    def columns(self) -> dict[str, Any]:
        """Return what a row keeps of it."""
        return {"cron": self.expression, "zone": self.zone, "every_seconds": None}

    def after(self, moment: datetime) -> datetime | None:
        """Return the first slot later than a moment; None if there is none in fifty years."""
        # Inside the second pass of a repeated hour the package begins with a time that is past.
        # Compared in UTC it is passed over, so that all workers agree on the next slot.
        for found in CronSim(self._fields, moment.astimezone(_zone(self.zone))):
            slot = found.astimezone(UTC)
            if slot > moment:
                return slot
        return None

    def backwards(self, moment: datetime) -> Iterator[datetime]:
        """Yield the slots up to a moment, that one included, the newest first."""
        # Walked forwards, a piece at a time. Backwards the package loses slots where the clocks of a
        # zone change by half an hour.
        end, span = moment, FIRST_SPAN
        while end > moment - LONGEST_LOOK:
            begin = end - span
            piece: list[datetime] = []
            slot = self.after(begin)
            while slot is not None and slot <= end:
                piece.append(slot)
                slot = self.after(slot)
            yield from reversed(piece)
            end, span = begin, span if len(piece) > MANY_SLOTS else span * 2


@dataclass(frozen=True, slots=True)
class Every:
    """Every so many elapsed seconds, counted from ``start_at``, by default the Unix epoch.

    Changes of the clocks have no effect. Raises `InvalidSchedule` for seconds out of bounds.
    """

    seconds: float
    start_at: datetime = EPOCH

    def __post_init__(self) -> None:
        number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not number or not MIN_EVERY_SECONDS <= self.seconds <= MAX_EVERY_SECONDS:
            raise InvalidSchedule(
                f"a schedule runs every {shown(self.seconds)} seconds; use {MIN_EVERY_SECONDS:g} to "
                f"{MAX_EVERY_SECONDS:,.0f}"
            )

    def columns(self) -> dict[str, Any]:
        """Return what a row keeps of it, beside ``start_at``."""
        return {"cron": "", "zone": "", "every_seconds": float(self.seconds)}

    @property
    def _step(self) -> timedelta:
        return timedelta(seconds=self.seconds)

    def after(self, moment: datetime) -> datetime | None:
        """Return the first slot later than a moment."""
        if moment < self.start_at:
            return self.start_at
        return self.start_at + ((moment - self.start_at) // self._step + 1) * self._step

    def backwards(self, moment: datetime) -> Iterator[datetime]:
        """Yield the slots up to a moment, that one included, the newest first."""
        slot = self.start_at + ((moment - self.start_at) // self._step) * self._step
        while slot >= self.start_at:
            yield slot
            slot -= self._step


def cron(expression: str, zone: str = "UTC") -> Cron:
    """Return the timing of a cron expression, ``cron("0 3 * * *", "Europe/Berlin")``.

    ``zone`` is an IANA time zone. Raises `InvalidSchedule`.
    """
    return Cron(expression, zone)


def every(seconds: float) -> Every:
    """Return the timing of every so many seconds, from 1 up. Raises `InvalidSchedule`."""
    return Every(seconds)


def slots_between(timing: Timing, since: datetime, until: datetime, most: int) -> list[datetime]:
    """Return the newest slots from ``since`` to ``until``, both included, the newest first."""
    found = []
    for slot in islice(timing.backwards(until), most):
        if slot < since:
            break
        found.append(slot)
    return found


def key_of(name: str, slot: datetime, *, manual: bool = False) -> str:
    """Return the idempotency key of the job of a slot: a second guard against a second job."""
    return f"{KEY}{name}{'!' if manual else ''}@{slot.astimezone(UTC).isoformat()}"


def slot_of(idempotency_key: str | None) -> datetime | None:
    """Return the slot that a job stands for, by its idempotency key; None if it is not scheduled."""
    if idempotency_key is None or not idempotency_key.startswith(KEY):
        return None
    try:
        slot = datetime.fromisoformat(idempotency_key.rpartition("@")[2])
    except ValueError:
        return None  # a key of the caller's own
    return slot if slot.tzinfo is not None else None


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError) as error:
        raise InvalidSchedule(
            f"there is no time zone {shown(name)}; use an IANA name such as Europe/Berlin, or UTC"
        ) from error
