"""Bare psycopg doing one job in each transaction: what a plain queue on this server does.

Imports nothing of Django, since processes of its own run it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import psycopg

from relay_queue.bench.measuring import BenchError
from relay_queue.bench.racing import race, wait_for_start

TAKE: Final = """
    SELECT id FROM bare_job WHERE queue = 'default' AND state = 'ready'
    ORDER BY rank, id LIMIT 1 FOR UPDATE SKIP LOCKED
"""
FINISH: Final = "UPDATE bare_job SET state = 'succeeded', finished_at = now() WHERE id = %s"


def one_by_one(address: Mapping[str, Any], jobs: int, processes: int) -> float:
    """Return the jobs a second of ``processes`` loops that empty ``bare_job`` together."""
    begin, ends = race(empty, (address,), processes)
    done = sum(count for count, _ in ends)
    if done != jobs:
        raise BenchError(f"the bare loops finished {done:,} of {jobs:,} jobs")
    seconds: float = max(end for _, end in ends) - begin
    return jobs / seconds


def empty(begin: float, results: Any, address: Mapping[str, Any]) -> None:
    """Take and finish jobs until there are none; put their number, and when it was over."""
    with psycopg.connect(**address, prepare_threshold=0) as server:
        wait_for_start(begin)
        done = 0
        while True:
            with server.transaction():
                found = server.execute(TAKE).fetchone()
                if found is not None:
                    server.execute(FINISH, found)
            if found is None:
                break
            done += 1
        results.put((done, time.monotonic()))
