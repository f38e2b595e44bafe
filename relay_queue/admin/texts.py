"""Texts that callers and functions wrote, as a viewer may see them: arguments, results, errors.

A viewer who may not see arguments may see neither messages of errors nor tracebacks, which often
quote an argument. The class of an exception is a name in the code and is shown with the attempt.
Arguments and results are redacted, laid out over lines, and cut to a length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.admin.redacting import Redactor, hidden
from relay_queue.models import Job, Lease

ARGUMENTS: Final = "arguments"
RESULT: Final = "result"
ERROR: Final = "error"
TRACEBACK: Final = "traceback"
MOST_SHOWN_CHARS: Final = 20_000
_INDENT: Final = "  "


def last_error(job: Job, newest: Any | None, *, may_see: bool) -> str:
    """Return the last error of a job; the class alone for those who may not see its message.

    ``newest`` is the lease that has the class, None if the viewer may not see it.
    """
    if not job.last_error:
        return ""
    if may_see:
        return formatted(ERROR, job.task, job.last_error)
    path = "" if newest is None else str(newest.error)
    return path.rpartition(".")[2] or hidden()


def traceback(lease: Lease, *, may_see: bool) -> str:
    """Return the traceback of an attempt; nothing if there is none."""
    if not lease.traceback:
        return ""
    return formatted(TRACEBACK, lease.job.task, lease.traceback) if may_see else hidden()


def formatted(kind: str, task: str, value: Any) -> str:
    """Return a value as the project's own formatter shows it; without one, the value, a text.

    An error of the formatter is shown in place of the value, by its class alone. Its message may
    contain what the formatter hides.
    """
    path = conf.get().formatter
    if path is None:
        return str(value)
    try:
        shown = import_string(path)(kind, task, value)
        if not isinstance(shown, str):
            raise TypeError
    except Exception as error:  # noqa: BLE001 - code of the project must not break a page
        name = type(error).__name__
        return _("(not shown: RELAY['FORMATTER'], %(path)s, raised %(name)s)") % {
            "path": path,
            "name": name,
        }
    return shown


def arguments(task: str, payload: str) -> str:
    """Return the arguments of a job as text, without the values that ``RELAY["REDACT"]`` names."""
    return _shown(ARGUMENTS, task, payload)


def result(task: str, text: str | None) -> str:
    """Return the result of a job as text, redacted like arguments; empty if there is no result."""
    return "" if text is None else _shown(RESULT, task, text)


def _shown(kind: str, task: str, text: str) -> str:
    redactor = Redactor(conf.get().redact)
    try:
        value = json.loads(text)
        if kind == ARGUMENTS:
            value = redactor.arguments(task, value)
        if conf.get().formatter is not None:
            return _cut([formatted(kind, task, redactor.all(value))])
        return _cut(pieces(value, redactor))
    except (ValueError, RecursionError):  # altered on disk: shown unchanged, if nothing is secret
        if redactor or conf.get().formatter is not None:
            return _("(not readable, so not shown: RELAY['REDACT'] or ['FORMATTER'] is set)")
        return _cut([text])


def _cut(found: Iterator[str] | list[str]) -> str:
    """Join pieces up to the limit. Pieces behind it are never made, however long the value is."""
    shown: list[str] = []
    room = MOST_SHOWN_CHARS
    for piece in found:
        if len(piece) > room:
            end = _("cut here: only %(n)s characters are shown") % {"n": f"{MOST_SHOWN_CHARS:,}"}
            return "".join([*shown, piece[:room], f"\n… {end}"])
        shown.append(piece)
        room -= len(piece)
    return "".join(shown)


def pieces(value: Any, redactor: Redactor, margin: str = "\n") -> Iterator[str]:
    """Yield a value of JSON as text, laid out over lines and redacted piece by piece.

    ``margin`` is a line's end and the indent of what closes the value.
    """
    if isinstance(value, dict) and value:
        items = ((f"{_scalar(key, None)}: ", key, item) for key, item in value.items())
        yield from _container("{}", items, redactor, margin)
    elif isinstance(value, list) and value:
        yield from _container("[]", (("", None, item) for item in value), redactor, margin)
    else:
        yield _scalar(value, redactor)


def _container(
    brackets: str, items: Iterator[tuple[str, Any, Any]], redactor: Redactor, margin: str
) -> Iterator[str]:
    inner = margin + _INDENT
    begin = brackets[0]
    for label, key, item in items:
        yield begin + inner + label
        shown = redactor.word if key is not None and redactor.hides(key) else item
        yield from pieces(shown, redactor, inner)
        begin = ","
    yield margin + brackets[1]


def _scalar(value: Any, redactor: Redactor | None) -> str:
    if isinstance(value, str) and redactor:
        value = redactor.text(value)
    return json.dumps(value, ensure_ascii=False)
