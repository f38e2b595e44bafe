"""Functions that a project could name in ``RELAY["FORMATTER"]``."""

from __future__ import annotations

from typing import Any


def shouted(kind: str, task: str, value: Any) -> str:
    """Return what was given, so that a test can see it."""
    return f"<{kind} of {task}: {value}>".upper()


def fails(kind: str, task: str, value: Any) -> str:
    """Raise an error that tells what it was given."""
    raise ValueError(value)


def nothing(kind: str, task: str, value: Any) -> Any:
    """Return no text."""
    return None
