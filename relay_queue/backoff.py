"""How long a failed job waits before its next attempt."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final, Literal, get_args

from relay_queue.exceptions import InvalidJob, shown

Jitter = Literal["none", "full"]
JITTERS: Final[tuple[str, ...]] = get_args(Jitter)

# Ten years. A longer delay is a mistake, and a much longer one leaves the calendar.
MAX_DELAY_SECONDS: Final = 315_360_000.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off: ``min(max, base × 2^(failures−1))`` seconds.

    With jitter ``"full"`` the delay is uniform between zero and that value, which spreads jobs that
    failed together. Raises `InvalidJob` for values that make no delay.
    """

    base_seconds: float = 1.0
    max_seconds: float = 300.0
    jitter: Jitter = "none"

    def __post_init__(self) -> None:
        for name in ("base_seconds", "max_seconds"):
            _require_delay(name, getattr(self, name))
        if self.base_seconds > self.max_seconds:
            raise InvalidJob(
                f"base_seconds of a back-off is {self.base_seconds:g}, above its max_seconds of "
                f"{self.max_seconds:g}. Lower the base or raise the maximum."
            )
        if self.jitter not in JITTERS:
            raise InvalidJob(f'jitter of a back-off is {shown(self.jitter)}; use "none" or "full".')

    def delay_seconds(self, failures: int, rng: random.Random | None = None) -> float:
        """Return the seconds to wait after the ``failures``-th charged failure, from 1 up.

        ``rng`` is where jitter draws from; by default the generator of the ``random`` module.
        Sample once per failure and persist the answer.
        """
        cap = self._cap_seconds(failures)
        if self.jitter == "none":
            return cap
        return (rng.uniform if rng else random.uniform)(0.0, cap)

    def _cap_seconds(self, failures: int) -> float:
        try:
            return min(self.max_seconds, math.ldexp(self.base_seconds, max(failures, 1) - 1))
        except OverflowError:  # more than a float can hold is more than any maximum
            return self.max_seconds


def _require_delay(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_DELAY_SECONDS:  # type: ignore[operator]
        raise InvalidJob(
            f"{name} of a back-off is {shown(value)}; "
            f"use seconds between 0 and {MAX_DELAY_SECONDS:,.0f} (ten years)."
        )
