"""A few dozen jobs for a new database, so that there is something to look at.

Nothing is written past the front door: the jobs are enqueued as any code would, and the worker
that starts next brings them into all their states.
"""

from __future__ import annotations

import time
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from relay_project import tasks
from relay_queue import store
from relay_queue.models import Job
from relay_queue.ranking import Priority

READERS = 20
VISITED_SECONDS = 3_600.0
MONTHS = 6
LATE_WIDTH = 2_500
"""Pixels that take longer than the timeout: the result is late and refused."""


def fill() -> int:
    """Enqueue the jobs if there are none at all. Returns how many were enqueued."""
    if Job.objects.exists():
        return 0
    with transaction.atomic():
        _that_succeed()
        _that_fail()
        _that_wait()
    return Job.objects.count()


def open_doors() -> None:
    """Let jobs keep coming for a while, so that there is something to watch."""
    tasks.receive_visitors.using(idempotency_key="visitors").enqueue(VISITED_SECONDS)


def _that_succeed() -> None:
    for n in range(READERS):
        urgent = Priority.HIGH if n % 5 == 0 else Priority.NORMAL
        tasks.send_welcome.using(priority=urgent).enqueue(f"reader-{n}@example.org")
    for month in range(1, MONTHS + 1):
        call = tasks.build_report.using(
            priority=Priority.LOW, idempotency_key=f"report-2026-{month:02}"
        )
        call.enqueue(f"2026-{month:02}", ["orders", "returns", "visits"])
    for name in tasks.KNOWN_PARTNERS:
        tasks.call_partner.enqueue(name)
    for width in (320, 640):
        tasks.resize_image.enqueue("harbour.jpg", width)
    tasks.await_upload.enqueue("holiday.mp4", complete_at=time.time() + 5)


def _that_fail() -> None:
    """Dead letters: refused for good, out of attempts, an unknown partner, too late."""
    for address in ("nobody", "reader-at-example.org"):
        tasks.send_welcome.enqueue(address)
    tasks.build_report.enqueue("2026-07", [])
    tasks.call_partner.enqueue("south-east")
    tasks.resize_image.enqueue("panorama.jpg", LATE_WIDTH)


def _that_wait() -> None:
    """Jobs that are under way for a while, wait for a retry or for their time, or were cancelled."""
    tasks.rebuild_index.enqueue(parts=900, seconds_per_part=1.0)
    for address in ("https://feeds.example.org/news", "https://feeds.example.org/weather"):
        tasks.import_feed.enqueue(address)
    tomorrow = timezone.now() + timedelta(days=1)
    for n in range(3):
        tasks.send_welcome.using(run_after=tomorrow).enqueue(f"tomorrow-{n}@example.org")
    mistaken = tasks.send_welcome.using(run_after=tomorrow).enqueue("wrong-list@example.org")
    with store.transaction() as tx:
        store.cancel(tx, [int(mistaken.id)])
