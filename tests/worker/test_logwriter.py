"""The writer of log lines, over a handler that takes none until it is told to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from relay_queue.worker.logwriter import JOB_THREADS, MAX_LINES, LogWriter
from tests.conftest import PATIENCE_SECONDS

logger = logging.getLogger("relay_queue.worker")


class Log(logging.Handler):
    """Keeps the lines, once it is open; until then whoever writes waits."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.entered = threading.Event(), threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.open.wait()
        self.lines.append(record.getMessage())


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    logger.addHandler(log)
    yield log
    log.open.set()
    logger.removeHandler(log)


@pytest.fixture
def writer(log: Log) -> Iterator[LogWriter]:
    writer = LogWriter()
    writer.take_over()
    yield writer
    log.open.set()
    assert writer.finish(PATIENCE_SECONDS)
    for name in logging.root.manager.loggerDict:
        logging.getLogger(name).removeFilter(writer)


def test_lines_wait_in_order_and_what_is_too_much_is_counted(log: Log, writer: LogWriter) -> None:
    logger.warning("line %d", 0)
    assert log.entered.wait(PATIENCE_SECONDS)  # this one is being written, and not waiting
    for number in range(1, MAX_LINES + 51):
        logger.warning("line %d", number)
    assert not writer.written(0)
    log.open.set()
    assert writer.written(PATIENCE_SECONDS)
    assert log.lines[:-1] == [f"line {number}" for number in range(MAX_LINES + 1)]
    assert log.lines[-1].startswith("50 lines of this log were dropped")


def test_a_handler_that_raises_loses_its_own_line_only(log: Log, writer: LogWriter) -> None:
    log.open.set()
    logger.warning("no number: %d", "x")
    logger.warning("the next")
    assert writer.written(PATIENCE_SECONDS)
    assert log.lines == ["the next"]


def test_no_thread_is_left_when_all_is_written(log: Log, writer: LogWriter) -> None:
    before = threading.active_count()
    logger.warning("a line")
    log.open.set()
    assert writer.written(PATIENCE_SECONDS)
    assert threading.active_count() == before


def test_threads_of_jobs_write_their_own_lines(log: Log, writer: LogWriter) -> None:
    slot = threading.Thread(target=logger.warning, args=["of a job"], name=f"{JOB_THREADS}-1")
    slot.start()
    assert log.entered.wait(PATIENCE_SECONDS)
    assert writer.written(0), "the line is with the thread of the job"
    log.open.set()
    slot.join()
    assert log.lines == ["of a job"]


def test_after_the_end_lines_go_straight_to_the_log(log: Log, writer: LogWriter) -> None:
    log.open.set()
    logger.warning("first")
    assert writer.finish(PATIENCE_SECONDS)
    logger.warning("second")
    assert log.lines == ["first", "second"]
