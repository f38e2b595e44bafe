"""Relay's loggers. What a job brings into a line of the log cannot pass for another line.

Task paths, queues, keys and errors come from jobs. With line ends and escape sequences in them they
could forge lines, or control the terminal of whoever reads the log.
"""

from __future__ import annotations

import logging
import textwrap
from contextlib import suppress
from typing import Final

_formatter: Final = logging.Formatter()
_INDENT: Final = "  "


def get_logger(name: str) -> logging.Logger:
    """Return the logger of this name, whose lines spell out control characters."""
    logger = logging.getLogger(name)
    logger.addFilter(spelling)  # which is added once, however often it is asked for
    return logger


def printable(text: str, *, keep: str = "") -> str:
    """Return the text with unprintable characters as escapes, but for those to ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


class Spelling(logging.Filter):
    """Spells out control characters in the message and the traceback of a record.

    It is a filter of the logger: a formatter belongs to the handlers, and those to the project.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record where it has any; let it pass. Never raises."""
        # What cannot be formatted is for the handler to report, as ever.
        with suppress(Exception):
            message = record.getMessage()
            # The template stays where it can: error reporters group lines by it.
            if not message.isprintable():
                record.msg, record.args = printable(message), None
        with suppress(Exception):
            if record.exc_info and not record.exc_text and _may_forge(record.exc_info[1]):
                record.exc_text = _set_apart(_formatter.formatException(record.exc_info))
        return True


def _may_forge(error: BaseException | None) -> bool:
    """Say whether an error, or one that led to it, has a text with control characters.

    Only then is the traceback formatted here. Otherwise the project's own formatters do it, which
    may write it in one line or leave parts out.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, BaseExceptionGroup) or hasattr(error, "__notes__"):
            return True
        if not str(error).isprintable():
            return True
        error = error.__cause__ or error.__context__
    return False


def _set_apart(traceback: str) -> str:
    # Indented, so that no line of an error's text begins as a line of the log does.
    return textwrap.indent(printable(traceback, keep="\n"), _INDENT, lambda _: True)


spelling: Final = Spelling()
"""The one of all of Relay's loggers."""
