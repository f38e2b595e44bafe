"""Whether a task signal is sent that only the framework's own log receiver would get."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils.log import AdminEmailHandler, RequireDebugTrue

from relay_queue import announce
from relay_queue.backend import RelayBackend
from relay_queue.compat import signals


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Return the parent of the framework's logger, set up as Django does it by default."""
    parent, own = logging.Logger("django", logging.INFO), logging.Logger("django.tasks")
    own.parent = parent
    console = logging.StreamHandler()
    console.setLevel(logging.INFO)
    console.addFilter(RequireDebugTrue())
    parent.addHandler(console)
    monkeypatch.setattr(signals, "logger", own)
    return parent


def sends(tell: Callable[..., None] = announce.started, **options: Any) -> bool:
    """Say whether a result is made for the receivers."""
    made: list[Any] = []

    def result() -> Any:
        made.append(SimpleNamespace(id="1"))
        return made[-1]

    tell(RelayBackend, result, **options)
    return bool(made)


@pytest.mark.parametrize("tell", [announce.started, announce.finished])
def test_where_every_handler_drops_the_line_no_signal_is_sent(
    parent: logging.Logger, tell: Callable[..., None]
) -> None:
    assert not sends(tell)


def test_under_debug_the_line_is_written(parent: logging.Logger, settings: Any) -> None:
    settings.DEBUG = True
    assert sends()


def test_a_handler_that_takes_the_line_gets_it(parent: logging.Logger) -> None:
    handler = logging.NullHandler()
    handler.setLevel(logging.WARNING)
    parent.addHandler(handler)
    assert not sends()
    handler.setLevel(logging.INFO)
    assert sends()


def test_failures_are_always_told(parent: logging.Logger) -> None:
    assert sends(announce.finished, failed=True)


def test_a_logger_that_passes_nothing_on_has_only_its_own_handlers(parent: logging.Logger) -> None:
    parent.addHandler(logging.NullHandler())
    signals.logger.propagate = False
    assert not sends()
    signals.logger.addHandler(logging.NullHandler())
    assert sends()


def test_a_failure_is_logged_by_the_framework_where_a_handler_writes_it(
    parent: logging.Logger, settings: Any
) -> None:
    parent.addHandler(AdminEmailHandler())  # a mail is no log
    parent.addHandler(logging.NullHandler())
    assert not announce.logs_failures()
    settings.DEBUG = True
    assert announce.logs_failures()
    settings.DEBUG = False
    parent.addHandler(logging.StreamHandler())
    assert announce.logs_failures()
    parent.handlers[-1].setLevel(logging.CRITICAL)
    assert not announce.logs_failures()


def test_a_failure_is_logged_by_python_where_there_is_no_handler(parent: logging.Logger) -> None:
    parent.handlers.clear()
    assert announce.logs_failures()


def test_a_failure_is_not_logged_where_the_logger_is_set_above_it(parent: logging.Logger) -> None:
    parent.addHandler(logging.StreamHandler())
    signals.logger.setLevel(logging.CRITICAL)
    assert not announce.logs_failures()


def test_a_failure_is_not_logged_where_the_receiver_was_taken_away(parent: logging.Logger) -> None:
    parent.addHandler(logging.StreamHandler())
    signals.task_finished.disconnect(signals.log_task_finished)
    try:
        assert not announce.logs_failures()
    finally:
        signals.task_finished.connect(signals.log_task_finished)


def test_a_filter_of_the_logger_sees_every_line(parent: logging.Logger) -> None:
    signals.logger.addFilter(lambda record: False)
    assert sends()


def test_whoever_replaces_the_method_that_calls_handlers_hears_everything(
    parent: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda self, record: None)
    assert sends()


def test_receivers_of_a_project_are_told_whatever_is_logged(parent: logging.Logger) -> None:
    def receive(**kwargs: Any) -> None:
        """Do nothing."""

    signals.task_started.connect(receive)
    try:
        assert sends()
    finally:
        signals.task_started.disconnect(receive)
