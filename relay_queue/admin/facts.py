"""Facts: names and values, as the pages of one job, one queue and one worker list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and a value of a page."""

    name: Any
    value: Any
