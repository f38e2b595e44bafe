"""Send the task framework's signals, when there is a receiver for them.

The framework connects a receiver of its own that writes a log line. When it is the only receiver
and no handler takes that line, the signal would cost more than many a function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from django.conf import settings
from django.dispatch import Signal
from django.utils.log import AdminEmailHandler, RequireDebugTrue

from relay_queue.compat import AnyResult, BaseTaskBackend, signals
from relay_queue.logs import get_logger, spelling

logger = get_logger("relay_queue.worker.executor")
get_logger(signals.logger.name)  # its lines have the tracebacks of functions


def enqueued(sender: type[BaseTaskBackend], result: AnyResult) -> None:
    """Send ``task_enqueued``. A receiver cannot make the enqueue, which stands, look failed."""
    if _is_heard(signals.task_enqueued, signals.log_task_enqueued, logging.DEBUG):
        signals.task_enqueued.send_robust(sender, task_result=result)


def started(sender: type[BaseTaskBackend], result: Callable[..., AnyResult], *facts: Any) -> None:
    """Send ``task_started``. ``result(*facts)`` is called only if there is a receiver."""
    if _is_heard(signals.task_started, signals.log_task_started, logging.INFO):
        _send(signals.task_started, sender, result, facts)


def finished(
    sender: type[BaseTaskBackend],
    result: Callable[..., AnyResult],
    *facts: Any,
    failed: bool = False,
) -> None:
    """Send ``task_finished``; as `started`."""
    level = logging.ERROR if failed else logging.INFO
    if _is_heard(signals.task_finished, signals.log_task_finished, level):
        _send(signals.task_finished, sender, result, facts)


def logs_failures() -> bool:
    """Whether the framework's own receiver writes an ERROR line about a final failure into a log."""
    receivers = signals.task_finished.receivers
    connected = any(receiver[0][0] == id(signals.log_task_finished) for receiver in receivers)
    return connected and _is_in_a_log(signals.logger, logging.ERROR)


def _is_heard(signal: Signal, log_receiver: Callable[..., Any], level: int) -> bool:
    receivers = signal.receivers
    if len(receivers) == 1 and receivers[0][0][0] == id(log_receiver):
        return _is_written(signals.logger, level)
    return bool(receivers)


def _is_written(logger: logging.Logger, level: int) -> bool:
    """Whether a handler takes a line of this level.

    As Django sets it up, the framework's lines go to one handler that drops them all unless
    ``DEBUG`` is on. To find that out by a record took 0.1 ms of a job's way to its function.
    """
    if not logger.isEnabledFor(level):
        return False
    # A filter may act, and an error reporter that replaces the method gets every line.
    filtered = any(one is not spelling for one in logger.filters)
    if level >= logging.WARNING or filtered or not _calls_handlers_only(logger):
        return True
    return any(h.level <= level and not _drops_all(h) for h in _handlers(logger))


def _is_in_a_log(logger: logging.Logger, level: int) -> bool:
    """Whether a line of this level gets into a log that people read, and not only into a mail."""
    if not logger.isEnabledFor(level) or not _calls_handlers_only(logger):
        return logger.isEnabledFor(level)
    handlers = list(_handlers(logger))
    takes_none = (AdminEmailHandler, logging.NullHandler)
    return not handlers or any(  # without any handler Python writes it to stderr
        h.level <= level and not _drops_all(h) and not isinstance(h, takes_none) for h in handlers
    )


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Yield the handlers that get the logger's lines: its own, then those that it passes them to."""
    passed_to: logging.Logger | None = logger
    while passed_to is not None:
        yield from passed_to.handlers
        passed_to = passed_to.parent if passed_to.propagate else None


def _calls_handlers_only(logger: logging.Logger) -> bool:
    return type(logger).callHandlers.__module__ == logging.__name__


def _drops_all(handler: logging.Handler) -> bool:
    return not settings.DEBUG and any(type(f) is RequireDebugTrue for f in handler.filters)


def _send(
    signal: Signal,
    sender: type[BaseTaskBackend],
    result: Callable[..., AnyResult],
    facts: tuple[Any, ...],
) -> None:
    """Send it, so that what a receiver raises does not pass for the function's outcome."""
    try:
        signal.send_robust(sender, task_result=result(*facts))
    except BaseException:  # noqa: BLE001 - a receiver may raise SystemExit, too
        warn("a receiver of a task signal failed", exc_info=True)


def warn(message: str, *args: object, exc_info: bool = False, level: int = logging.WARNING) -> None:
    """Log a warning. A handler may raise, if only because the exception cannot be formatted."""
    with suppress(BaseException):
        logger.log(level, message, *args, exc_info=exc_info)
