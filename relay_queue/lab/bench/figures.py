"""The figures: what each is, what it is held to, how it is taken from samples, and judged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for a figure's value, or for its ratio to the baseline."""

    of: Literal["value", "ratio"]
    sign: Literal[">=", "<="]
    limit: float

    def __str__(self) -> str:
        return f"{self.of} {self.sign} {self.limit:,g}"

    def holds(self, value: float, ratio: float | None) -> bool:
        """Say whether a measurement keeps the bar."""
        judged = value if self.of == "value" else ratio
        if judged is None:
            return False
        return judged >= self.limit if self.sign == ">=" else judged <= self.limit


@dataclass(frozen=True, slots=True)
class Spec:
    """One figure: the family that it is measured in, its unit, its bar and its meaning."""

    family: str
    unit: str
    bar: Bar
    meaning: str


SPECS: Final[Mapping[str, Spec]] = {
    "lease_ack_4x16": Spec(
        "load", "jobs/s", Bar("value", ">=", 20_000), "claim and ack, 4 workers of 16 slots"
    ),
    "fair_share": Spec(
        "load", "ratio", Bar("value", ">=", 0.85), "smallest share of 4 workers by the largest"
    ),
    "other_writer_p99": Spec(
        "load", "ms", Bar("value", "<=", 25), "another program's write while 4 workers are busy"
    ),
    "lease_ack_1x1": Spec(
        "single", "jobs/s", Bar("ratio", ">=", 0.85), "claim and ack, 1 worker of 1 slot"
    ),
    "claim_1m": Spec(
        "depth", "jobs/s", Bar("ratio", ">=", 0.8), "claim and ack in a huge table by a small one"
    ),
    "enqueue_one": Spec("enqueue", "jobs/s", Bar("ratio", ">=", 0.65), "enqueue, one job a commit"),
    "enqueue_bulk": Spec(
        "enqueue", "jobs/s", Bar("value", ">=", 50_000), "enqueue, many jobs a commit"
    ),
    "pickup_p50": Spec("latency", "ms", Bar("value", "<=", 1), "enqueue returned to job entered"),
    "pickup_p99": Spec("latency", "ms", Bar("value", "<=", 3), "the same, slowest of a hundred"),
    "idle_cpu": Spec(
        "resources", "% of a core", Bar("value", "<=", 0.3), "one worker with nothing to do"
    ),
    "kill_recovery_p50": Spec(
        "recovery", "s", Bar("value", "<=", 1), "kill -9 to the job running in another process"
    ),
    "worker_rss": Spec(
        "resources", "MiB", Bar("value", "<=", 10), "worker of 64 slots above an idle shell"
    ),
    "console_page_p95": Spec(
        "console", "ms", Bar("value", "<=", 300), "the slowest list, filter, jump or search"
    ),
    "console_fragment_p95": Spec(
        "console", "ms", Bar("value", "<=", 50), "what a dashboard fetches every few seconds"
    ),
    "pg_lease_ack_4x16": Spec(
        "postgresql", "jobs/s", Bar("value", ">=", 10_000), "claim and ack, 4 workers of 16 slots"
    ),
    "pg_over_one_by_one": Spec(
        "postgresql", "jobs/s", Bar("ratio", ">=", 3), "the same by loops of one job a transaction"
    ),
    "pg_claim_1m": Spec(
        "postgresql", "jobs/s", Bar("ratio", ">=", 0.8), "claim and ack in a huge table by a small"
    ),
    "pg_pickup_p50": Spec(
        "postgresql", "ms", Bar("value", "<=", 3), "enqueue returned to job entered"
    ),
    "pg_console_page_p95": Spec(
        "postgresql_console", "ms", Bar("value", "<=", 300), "the slowest page, as on SQLite"
    ),
    "pg_console_fragment_p95": Spec(
        "postgresql_console", "ms", Bar("value", "<=", 50), "what a dashboard fetches, too"
    ),
}
"""The figures by name, in the order in which they are shown."""

ON_SERVER: Final = frozenset({"postgresql", "postgresql_console"})
"""The families that measure a server."""

WITH_CONSOLE: Final = frozenset({"console", "postgresql_console"})
"""The families that need the admin. Workers do not, and their memory is measured without it."""


def names_for(engine: Literal["sqlite", "postgresql"]) -> list[str]:
    """Return the figures that are measured on an engine."""
    on_server = engine == "postgresql"
    return [name for name, spec in SPECS.items() if (spec.family in ON_SERVER) is on_server]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement, judged.

    ``value`` is None if it could not be measured; ``fault`` then says why. ``context`` has what
    else was seen, by name.
    """

    name: str
    value: float | None
    unit: str
    baseline: float | None
    ratio: float | None
    bar: str
    ok: bool
    baseline_is: str = ""
    fault: str = ""
    context: Mapping[str, Any] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return asdict(self)


def judge(
    name: str,
    value: float,
    *,
    baseline: float | None = None,
    baseline_is: str = "",
    fault: str = "",
    **context: Any,
) -> Figure:
    """Hold a measurement to its bar. A ``fault`` fails it whatever the value is.

    ``baseline_is`` says in a few words what the baseline did; both are in the figure's unit.
    """
    spec = SPECS[name]
    ratio = value / baseline if baseline else None
    return Figure(
        name=name,
        value=_rounded(value),
        unit=spec.unit,
        baseline=None if baseline is None else _rounded(baseline),
        ratio=None if ratio is None else _rounded(ratio),
        bar=str(spec.bar),
        ok=spec.bar.holds(value, ratio) and not fault,
        baseline_is=baseline_is,
        fault=fault,
        context=context,
    )


def _rounded(value: float) -> float:
    """Keep five digits: no measurement here is better than that."""
    return float(f"{value:.5g}")


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that ``percent`` per cent of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def timed(act: Callable[[], object]) -> float:
    """Return how many seconds a call took."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
