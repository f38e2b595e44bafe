"""The beginning and the end of a worker process, for what lives beside the jobs in it.

A forked child has none of its parent's threads. `os._exit`, which a stuck function cannot delay,
runs no exit handler. Log listeners, error reporters and telemetry senders rely on both. So the
process begins with a signal. It ends with a signal and the exit handlers, within a limited time.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from logging.handlers import QueueListener
from typing import Any, NoReturn

from relay_queue.logs import get_logger
from relay_queue.signals import worker_process_started, worker_process_stopping
from relay_queue.worker.logwriter import log_writer

logger = get_logger("relay_queue.worker")

EXIT_SECONDS = 4.0
"""How long the end of a process may take once its work is over. Less than the supervisor's grace."""

REST_SECONDS = 1.0
"""How long a fork waits for the threads that write logs. One that is held up must not hold it up."""


@dataclass(slots=True)
class _Process:
    """What this process knows of itself: the worker that it is, if it is one.

    ``left_behind`` are the names of the threads that the last fork left in the parent.
    """

    name: str | None = None
    left_behind: set[str] = field(default_factory=set)


_process = _Process()


@contextmanager
def threads_at_rest() -> Iterator[bool]:
    """Fork within: threads that write logs rest meanwhile, and go on in both processes.

    Yields whether all of them rest. A thread in the midst of its work would leave its locks locked
    in the child for ever.
    """
    parent = os.getpid()
    quiet = log_writer.written(REST_SECONDS)
    resting, moving = _stop_listeners()
    with warnings.catch_warnings():
        # What Python 3.12 warns of is known here. Printing it may wait for ever.
        warnings.simplefilter("ignore", DeprecationWarning)
        _process.left_behind = {name for name in _names() if not name.startswith("relay-")}
        try:
            yield quiet and not moving
        finally:
            if os.getpid() != parent:
                log_writer.forget_parent()
            else:
                for listener, stopping in moving:
                    _in_thread(partial(_restart, listener, stopping))
            for listener in resting:
                listener.start()


def begin(name: str) -> None:
    """Begin the life of worker ``name``, in its own process: tell the receivers."""
    _process.name = name
    log_writer.take_over()
    _disown()
    worker_process_started.send_robust(sender=None, name=name)
    lost = _process.left_behind - set(_names())
    if lost:
        logger.warning(
            "Worker %s runs without threads that were started before it was forked: %s. Start them "
            "in a receiver of relay_queue.signals.worker_process_started",
            name,
            ", ".join(sorted(lost)),
        )


def leave(code: int, *, seconds: float = EXIT_SECONDS) -> NoReturn:
    """End this process within ``seconds``, after whatever waits for its end.

    That is, in this order: receivers of the signal, if this is a worker; threads that are no
    daemons; exit handlers, those that were registered before the fork included. Daemon threads,
    stuck functions among them, are not waited for.
    """
    deadline = threading.Timer(seconds, os._exit, [code])
    deadline.daemon = True
    try:
        deadline.start()
        if _process.name is not None:
            worker_process_stopping.send_robust(sender=None, name=_process.name, exit_code=code)
        # Not here: the handlers must have their turn while a thread is stuck.
        _in_thread(threading._shutdown).join(seconds / 2)  # type: ignore[attr-defined]
        log_writer.finish(seconds / 4)  # a handler may end what takes these lines
        atexit._run_exitfuncs()
        flush_standard_streams()
    finally:
        os._exit(code)


def flush_standard_streams() -> None:
    """Write what was printed. Waits until the reader takes it."""
    for stream in (sys.stdout, sys.stderr):
        # A stream can be missing, closed, or a pipe whose reader is gone.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _disown() -> None:
    """Leave to the supervisor what it made: the end of one worker must not take it from all.

    Those are temporary directories, which go at the exit of their process, and other programs.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes._children.clear()


def _names() -> list[str]:
    me = threading.current_thread()
    return [thread.name for thread in threading.enumerate() if thread is not me]


def _stop_listeners() -> tuple[list[QueueListener], list[tuple[QueueListener, threading.Thread]]]:
    """Stop the log listeners that run; return those that rest, and those still at a line."""
    running = [_listener(thread) for thread in threading.enumerate()]
    stops = [(found, _in_thread(found.stop)) for found in running if found is not None]
    for _, stopping in stops:
        stopping.join(REST_SECONDS)
    resting = [listener for listener, stopping in stops if not stopping.is_alive()]
    return resting, [(listener, stopping) for listener, stopping in stops if stopping.is_alive()]


def _listener(thread: threading.Thread) -> QueueListener | None:
    """Return the listener that a thread belongs to; there is no list of them."""
    owner = getattr(getattr(thread, "_target", None), "__self__", None)
    return owner if isinstance(owner, QueueListener) else None


def _restart(listener: QueueListener, stopping: threading.Thread) -> None:
    stopping.join()
    listener.start()


def _in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, name="relay-end", daemon=True)
    thread.start()
    return thread
