"""Running the families of figures, each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from relay_queue.bench.figures import SPECS, Figure
from relay_queue.scratch import dependent

SERVER_VARIABLE: Final = "RELAY_BENCH_SERVER"
"""Names the entry of ``DATABASES`` whose server is measured, as JSON, to the processes."""


def by_family(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the families that measure these figures, with the figures of each."""
    families: dict[str, list[str]] = {}
    for name, spec in SPECS.items():
        if name in names:
            families.setdefault(spec.family, []).append(name)
    return families


def measure(
    family: str,
    names: Sequence[str],
    folder: Path,
    *,
    quick: bool,
    say: Callable[[str], None],
    variables: Mapping[str, str] | None = None,
) -> Iterator[Mapping[str, Any]]:
    """Yield the figures of one family as they come, as plain values; ``folder`` must be new.

    A figure that could not be measured has no value, is not ok, and its ``fault`` says why.
    """
    folder.mkdir()
    missing, reason = list(names), ""
    arguments = [family, str(folder), *names, *(["--quick"] if quick else [])]
    with dependent.started("relay_queue.bench", arguments, folder, variables or {}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for kind, value in json.loads(line).items():
                if kind == "figure":
                    missing.remove(value["name"])
                    yield value
                elif kind == "failed":
                    reason = value
                else:
                    say(value)
        code = process.wait()
    for name in missing:
        yield _unmeasured(name, reason or f"the process that measures it ended with code {code}")


def _unmeasured(name: str, fault: str) -> Mapping[str, Any]:
    spec = SPECS[name]
    return Figure(name, None, spec.unit, None, None, str(spec.bar), False, fault=fault).as_data()
