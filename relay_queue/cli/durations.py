"""Durations as people write and read them: ``7d``, ``90m``; ``3 m 4 s``."""

from __future__ import annotations

import argparse
import re
from typing import Final

UNITS: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
"""Seconds in each unit."""

MAX_SECONDS: Final = 100 * 365 * 86_400


def parse(text: str) -> float:
    """Return the seconds of ``7d``, ``12h``, ``30m``, ``45s`` or ``45``, for argparse.

    Raises ``ArgumentTypeError`` for anything else, and for more than a hundred years.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([dhms]?)", text.strip().lower(), re.ASCII)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration. Write 7d, 12h, 30m or 45s.")
    seconds = float(found[1]) * UNITS[found[2] or "s"]
    if seconds > MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than a hundred years.")
    return seconds


def show(seconds: float | None) -> str | None:
    """Return a duration in its two largest units; None stays None, which a table shows as ``-``."""
    if seconds is None:
        return None
    if abs(seconds) < 10:
        return f"{seconds:.1f} s"
    left = round(abs(seconds))
    parts = []
    for unit, size in UNITS.items():
        n, left = divmod(left, size)
        if n:
            parts.append(f"{n} {unit}")
    return ("-" if seconds < 0 else "") + " ".join(parts[:2])
