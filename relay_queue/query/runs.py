"""Schedules as they stand: when each runs next, and what became of its last slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import OuterRef, Subquery

from relay_queue import conf
from relay_queue.models import Schedule, ScheduleRun
from relay_queue.store.schedules import DECLARED


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """One schedule: its columns, when it runs next, and why it stands still if it does."""

    name: str
    source: str
    columns: Mapping[str, Any]
    next_at: datetime | None
    last_slot_at: datetime | None
    last_job_id: int | None
    last_outcome: str
    stands_still: str

    @property
    def when(self) -> str:
        """The timing in a few words."""
        if self.columns["cron"]:
            return f"{self.columns['cron']} {self.columns['zone']}"
        return f"every {self.columns['every_seconds']:g} s"


def schedules() -> list[ScheduleStatus]:
    """Return all schedules, by name."""
    newest = ScheduleRun.objects.filter(schedule_id=OuterRef("pk"), manual=False)
    rows = Schedule.objects.using(conf.get().database).annotate(
        last_outcome=Subquery(newest.order_by("-slot_at").values("outcome")[:1])
    )
    return [_status(row) for row in rows.order_by("name")]


def schedule(name: str) -> ScheduleStatus | None:
    """Return the schedule of a name; None if there is none."""
    return next((found for found in schedules() if found.name == name), None)


def _status(row: Any) -> ScheduleStatus:
    reasons = (
        (row.retired_at, "not in the code any more"),
        (row.paused_at, "paused"),
        (row.fault, row.fault),
        (row.next_at is None, "past its end"),
    )
    return ScheduleStatus(
        name=row.name,
        source=row.source,
        columns={column: getattr(row, column) for column in DECLARED},
        next_at=row.next_at,
        last_slot_at=row.last_slot_at,
        last_job_id=row.last_job_id,
        last_outcome=row.last_outcome or "",
        stands_still=next((why for holds, why in reasons if holds), ""),
    )
