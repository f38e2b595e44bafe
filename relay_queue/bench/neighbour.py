"""Another program's writes, of a table that is not Relay's."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

from django.contrib.sessions.models import Session
from django.db import OperationalError

from relay_queue import clock
from relay_queue.bench.measuring import timed

PAUSE_SECONDS = 0.005


def write_while(busy: Callable[[], bool]) -> list[float | None]:
    """Write one row after another, each in its own commit; return milliseconds, None if refused."""
    taken: list[float | None] = []
    while busy():
        try:
            taken.append(timed(_write) * 1000)
        except OperationalError:
            taken.append(None)
        time.sleep(PAUSE_SECONDS)  # a neighbour that writes now and then, not a fifth worker
    return taken


def _write() -> None:
    until = clock.now() + timedelta(days=1)
    Session.objects.create(session_key=uuid4().hex, session_data="", expire_date=until)
