"""Bare psycopg doing one job in each transaction: what a plain queue on this server does.

Imports nothing of Django, since processes of its own run it.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from typing import Any, Final

import psycopg

from relay_queue.bench.measuring import BenchError

WARM_UP_SECONDS: Final = 1.0

TAKE: Final = """
    SELECT id FROM bare_job WHERE queue = 'default' AND state = 'ready'
    ORDER BY rank, id LIMIT 1 FOR UPDATE SKIP LOCKED
"""
FINISH: Final = "UPDATE bare_job SET state = 'succeeded', finished_at = now() WHERE id = %s"


def race(address: Mapping[str, Any], jobs: int, processes: int) -> float:
    """Return the jobs a second of ``processes`` loops that empty ``bare_job`` together."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    begin = time.monotonic() + WARM_UP_SECONDS
    loops = [
        context.Process(target=_work, args=(address, begin, results)) for _ in range(processes)
    ]
    try:
        for loop in loops:
            loop.start()
        for loop in loops:
            loop.join()
        if any(loop.exitcode for loop in loops):
            raise BenchError("a bare loop failed; its error is above")
    finally:
        for loop in loops:
            if loop.is_alive():
                loop.kill()
    ends = [results.get() for _ in loops]
    done = sum(count for count, _ in ends)
    if done != jobs:
        raise BenchError(f"the bare loops finished {done:,} of {jobs:,} jobs")
    seconds: float = max(end for _, end in ends) - begin
    return jobs / seconds


def _work(address: Mapping[str, Any], begin: float, results: Any) -> None:
    with psycopg.connect(**address, prepare_threshold=0) as server:
        # All loops begin at one moment: the clock runs from there.
        time.sleep(max(0.0, begin - time.monotonic()))
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
