"""``python -m relay_queue.drill.writer N …``: a program that is killed before it can tidy up.

Enqueues N jobs in one transaction, for each N, and kills itself: what it has committed is in the log
and nobody has closed the database.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

import django

MARK: Final = "of the killed writer"


def main(*sizes: str) -> None:
    """Enqueue, and die."""
    django.setup()
    from relay_queue.backend import RelayBackend
    from relay_queue.compat import task_backends
    from relay_queue.drill import tasks

    backend = task_backends["default"]
    assert isinstance(backend, RelayBackend)
    for size in sizes:
        backend.enqueue_many([(tasks.pay, (f"order {n} {MARK}",), {}) for n in range(int(size))])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
