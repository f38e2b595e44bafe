"""How long the pages of the console take on a large database of PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

from relay_queue.bench import console, server
from relay_queue.bench.crowd import settle_on_server
from relay_queue.bench.figures import Figure
from relay_queue.bench.run import Run


def measure(run: Run) -> Iterator[Figure]:
    """Measure ``pg_console_page_p95`` and ``pg_console_fragment_p95``."""
    with server.scratch_database():
        crowd = console.announced(run)
        settle_on_server(crowd)
        yield from console.visit(run, crowd, "pg_")
