"""What values the tables accept: each check returns a plain value or raises `InvalidJob`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeGuard

from relay_queue import clock
from relay_queue.exceptions import InvalidJob, shown

LATEST: Final = datetime(9999, 12, 30, tzinfo=UTC)
"""The last time that is stored: a day before Python's last, which some time zones cannot show."""

MAX_ID: Final = 2**63 - 1
"""The largest id that a row can have."""


def is_id(value: int) -> bool:
    """Say whether a row can have this id. Databases do not look up a longer number: they fail."""
    return 0 < value <= MAX_ID


def parse_id(text: str) -> int | None:
    """Return the whole number that a text spells; None if it is none, or longer than any id."""
    # Python refuses to read very long ones.
    short = len(text) <= len(str(MAX_ID))
    return int(text) if short and text.isascii() and text.isdecimal() else None


def valid_ids(values: Iterable[int]) -> list[int]:
    """Return the ids that rows can have, each once, in the order given; the others are unknown."""
    return [value for value in dict.fromkeys(values) if is_id(value)]


_INCARNATION: Final = re.compile(r"[0-9a-f]{32}")


def is_incarnation(value: object) -> TypeGuard[str]:
    """Say whether a value can be what a worker drew as its incarnation: 32 hexadecimal digits.

    Only then may it name a file, or be taken for a number: rows can be altered.
    """
    return isinstance(value, str) and _INCARNATION.fullmatch(value) is not None


def is_storable(value: str) -> bool:
    """Say whether every database can store, and look for, a text: not a NUL or a lone surrogate."""
    return "\x00" not in value and (value.isascii() or _encodes(value))


def require_text(name: str, value: object, limit: int) -> str:
    """Return a string of 1 to ``limit`` characters that every database can store."""
    if not isinstance(value, str):
        raise InvalidJob(f"{name} must be a string, not {type(value).__name__}")
    # A subclass may format as something else than what it stores, an Enum for one.
    plain = str.__str__(value)
    if not 1 <= len(plain) <= limit:
        raise InvalidJob(f"{name} is {len(plain)} characters long; it must have 1 to {limit}")
    if not is_storable(plain):
        raise InvalidJob(f"{name} {plain!r} contains a NUL or a lone surrogate; remove it")
    return plain


def require_int(name: str, value: object, low: int, high: int) -> int:
    """Return a whole number between two bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidJob(
            f"{name} must be a whole number between {low} and {high}, not {shown(value)}"
        )
    if not low <= value <= high:
        raise InvalidJob(f"{name} is {shown(value)}; it must be between {low} and {high}")
    return int(value)


def require_seconds(name: str, value: object, low: float, high: float) -> float:
    """Return a finite number of seconds between two bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidJob(
            f"{name} must be a number of seconds between {low:g} and {high:g}, not {shown(value)}"
        )
    # Compared before anything else: NaN fails here, and no huge integer is made a float.
    if not low <= value <= high or not math.isfinite(value):
        raise InvalidJob(
            f"{name} is {shown(value)}; it must be between {low:g} and {high:g} seconds"
        )
    return float(value)


def require_aware(name: str, value: object) -> datetime:
    """Return an aware datetime in UTC."""
    if not isinstance(value, datetime):
        raise InvalidJob(f"{name} must be a datetime, not {shown(value)}")
    if value.utcoffset() is None:
        raise InvalidJob(f"{name} {value!r} has no time zone; use django.utils.timezone")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidJob(f"{name} {value!r} has no equivalent in UTC") from None


def require_run_after(value: object, max_defer_seconds: float | None) -> datetime:
    """Return the time of a deferred job, not too far ahead."""
    due = require_aware("run_after", value)
    if due > LATEST:
        raise InvalidJob(
            f"run_after {due.isoformat()} is too late; the last is {LATEST.isoformat()}"
        )
    if max_defer_seconds is not None and (due - clock.now()).total_seconds() > max_defer_seconds:
        raise InvalidJob(
            f"run_after {due.isoformat()} is more than {max_defer_seconds:g} seconds ahead; "
            'choose an earlier time or raise RELAY["MAX_DEFER_SECONDS"]'
        )
    return due


def require_idempotency_key(value: object) -> str | None:
    """Return the key of a call as a plain string, or None if it has none."""
    return None if value is None else require_text("idempotency_key", value, 255)


def require_arguments(args: Any, kwargs: Any) -> None:
    """Check that these are positional and keyword arguments, not a string or a mapping by slip."""
    if type(args) in (list, tuple) and type(kwargs) is dict:
        return  # what nearly everybody passes, asked without the abstract classes
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise InvalidJob(f"args must be a list or a tuple, not {type(args).__name__}")
    if not isinstance(kwargs, Mapping):
        raise InvalidJob(f"kwargs must be a dict, not {type(kwargs).__name__}")


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
