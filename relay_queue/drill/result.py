"""What came of one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from relay_queue.drill.observation import Observation
from relay_queue.drill.promises import PROMISES

KEPT: Final = "kept"
DIFFERS: Final = "differs"
NOT_APPLICABLE: Final = "not applicable"


@dataclass(frozen=True, slots=True)
class Result:
    """``fault`` says why the row could not be looked at to its end; ``log`` is for a row that differs.

    ``reason`` says why the row was not executed at all, since it does not apply.
    """

    row: str
    observed: Sequence[Observation] = ()
    fault: str = ""
    seconds: float = 0.0
    log: Sequence[str] = field(default_factory=list)
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Say in a word or two what came of it. To have seen nothing is not enough."""
        if self.reason:
            return NOT_APPLICABLE
        kept = self.observed and not self.fault and all(o.held for o in self.observed)
        return KEPT if kept else DIFFERS

    def as_data(self) -> dict[str, Any]:
        """Return it as plain values, with the words of the table."""
        promise = PROMISES[self.row]
        return {
            "row": self.row,
            "failure": promise.failure,
            "promise": promise.promise,
            "observed": [observation.as_data() for observation in self.observed],
            "verdict": self.verdict,
            "reason": self.reason,
            "fault": self.fault,
            "seconds": round(self.seconds, 1),
            "log": list(self.log),
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Result:
        """Return what `as_data` had; the verdict is judged anew."""
        observed = [Observation(**values) for values in data["observed"]]
        return cls(
            data["row"], observed, data["fault"], data["seconds"], data["log"], data["reason"]
        )
