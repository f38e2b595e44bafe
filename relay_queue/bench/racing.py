"""Plain processes that begin at one moment. Imports nothing of Django, which they do not need."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from relay_queue.bench.measuring import BenchError

WARM_UP_SECONDS: Final = 1.0


def race(
    work: Callable[..., Any], arguments: Sequence[Any], processes: int
) -> tuple[float, list[Any]]:
    """Run ``work(begin, results, *arguments)`` in processes of its own; return the begin and results.

    ``begin`` is on the monotonic clock, the same for all; each does `wait_for_start` and puts one
    result. Raises `BenchError` if one fails.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    begin = time.monotonic() + WARM_UP_SECONDS
    racers = [
        context.Process(target=work, args=(begin, results, *arguments)) for _ in range(processes)
    ]
    try:
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        if any(racer.exitcode for racer in racers):
            raise BenchError(f"{work.__name__} failed in a process of its own; its error is above")
    finally:
        for racer in racers:
            if racer.is_alive():
                racer.kill()
    return begin, [results.get() for _ in racers]


def wait_for_start(begin: float) -> None:
    """Sleep until all begin."""
    time.sleep(max(0.0, begin - time.monotonic()))  # the first to be ready would look faster
