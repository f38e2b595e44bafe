"""A monotonic clock that only a test moves."""

from __future__ import annotations

from types import ModuleType

import pytest


class Monotonic:
    """Stands in for the module ``time`` of the modules under test."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def stop_time(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Monotonic:
    """Give these modules a clock that stands still until it is moved."""
    clock = Monotonic()
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return clock
