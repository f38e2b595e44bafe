"""What a job brings into a line of the log cannot pass for another line."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from relay_queue.compat import signals
from relay_queue.logs import get_logger, printable

FORGED = "\n2026-01-01 ERROR relay_queue forged\x1b[2J\r\x07\u202e\x9b31m\ud800"
NAME = "relay_queue.test_logs"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Return what a handler of the project writes, with a formatter of its own."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    loggers = [get_logger(NAME), signals.logger]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel("INFO")
        logger.propagate = False
    yield written
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.mark.parametrize("text", [FORGED, ValueError(FORGED)], ids=["text", "error"])
def test_a_line_of_the_log_stays_one_line_whatever_a_job_puts_into_it(
    log: io.StringIO, text: object
) -> None:
    get_logger(NAME).warning("job %s failed: %s", 7, text)
    line = log.getvalue()
    assert line.removesuffix("\n").isprintable()
    assert line.startswith(
        "WARNING job 7 failed: \\n2026-01-01 ERROR relay_queue forged\\x1b[2J\\r"
    )


def test_a_traceback_without_control_characters_is_the_formatters_own(log: io.StringIO) -> None:
    class OneLine(logging.Formatter):
        def formatException(self, ei: Any) -> str:
            return f"<{ei[0].__name__}: {ei[1]}>"

    handler = next(h for h in get_logger(NAME).handlers if getattr(h, "stream", None) is log)
    handler.setFormatter(OneLine("%(message)s"))
    try:
        raise ValueError("plain")
    except ValueError:
        get_logger(NAME).exception("it failed")
    assert log.getvalue() == "it failed\n<ValueError: plain>\n"


@pytest.mark.parametrize("cause", ["cause", "context", "note", "group"])
def test_control_characters_anywhere_in_a_traceback_are_spelled_out(
    log: io.StringIO, cause: str
) -> None:
    try:
        try:
            raise ValueError(FORGED)
        except ValueError as error:
            if cause == "note":
                plain = KeyError("plain")
                plain.add_note(FORGED)
                raise plain from None
            if cause == "group":
                raise ExceptionGroup("several", [error]) from None
            if cause == "cause":
                raise KeyError("plain") from error
            raise KeyError("plain")  # noqa: B904 - the context is what is tested
    except Exception:
        get_logger(NAME).exception("it failed")
    assert all(line.isprintable() for line in log.getvalue().removesuffix("\n").split("\n"))


@pytest.mark.parametrize("name", [NAME, signals.logger.name])
def test_no_line_of_a_traceback_begins_as_a_line_of_the_log_does(
    log: io.StringIO, name: str
) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger(name).exception("it failed")
    first, *others = log.getvalue().removesuffix("\n").split("\n")
    assert first == "ERROR it failed"
    assert re.match("  Traceback", others[0])
    assert others[-1].startswith("  2026-01-01 ERROR relay_queue forged\\x1b[2J")
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_a_line_without_control_characters_keeps_its_template_for_error_reporters(
    log: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    logger = get_logger(NAME)
    logger.addHandler(caplog.handler)
    try:
        logger.warning("job %s failed: %s", 7, "Ärger")
    finally:
        logger.removeHandler(caplog.handler)
    (record,) = caplog.records
    assert (record.msg, record.args) == ("job %s failed: %s", (7, "Ärger"))
    assert log.getvalue() == "WARNING job 7 failed: Ärger\n"


def test_an_argument_that_cannot_be_shown_harms_nobody_but_its_own_line(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mute:
        def __str__(self) -> str:
            raise ValueError("no words")

    monkeypatch.setattr(logging, "raiseExceptions", False)
    get_logger(NAME).warning("%s", Mute())
    get_logger(NAME).warning("next")
    assert log.getvalue() == "WARNING next\n"


def test_kept_characters_stay() -> None:
    assert printable("a\tb\nc", keep="\n") == "a\\tb\nc"
