"""For the tests of projects that use Relay. No worker, no threads, the real store.

Everything works inside Django's ``TestCase``, whose transaction it joins, and with pytest-django's
``db``, on a database in memory too. Jobs that wait for the commit of another database, see
``enqueue_on_commit`` of `relay_queue.backend.RelayBackend`, are enqueued when it is pretended:
``with self.captureOnCommitCallbacks(execute=True)``. Until then the functions here warn of them.
"""

from relay_queue.testing.looking import (
    assert_enqueued,
    assert_not_enqueued,
    capture_enqueued,
    enqueued,
)
from relay_queue.testing.running import run_on_enqueue, run_pending

__all__ = [
    "assert_enqueued",
    "assert_not_enqueued",
    "capture_enqueued",
    "enqueued",
    "run_on_enqueue",
    "run_pending",
]
