"""One reading of the wall clock per transaction, and the integer time that ranks are made of.

In-process timers use ``time.monotonic`` and never this module: the wall clock may jump.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def _wall() -> datetime:
    return datetime.now(UTC)


_source: Callable[[], datetime] = _wall


def now() -> datetime:
    """Return the wall clock as an aware UTC datetime."""
    return _source()


def overridden() -> datetime | None:
    """Return the time that `use` has set, or None while the clocks are real."""
    return None if _source is _wall else _source()


def of_database(reading: datetime) -> datetime:
    """Return what a database's clock says, unless `use` has set the time."""
    return overridden() or reading


@contextmanager
def use(source: Callable[[], datetime]) -> Iterator[None]:
    """Read the time from ``source`` inside the block: for simulations and tests."""
    global _source  # noqa: PLW0603
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before


def to_microseconds(moment: datetime) -> int:
    """Return whole microseconds since 1970-01-01 UTC. Exact, unlike ``datetime.timestamp``."""
    return (moment - _EPOCH) // _MICROSECOND
